"""Arrival processes: their rate, their burstiness, and that a seed repeats them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.errors import SettingError
from deepinfer_lab.workload.arrivals import LEAST_CV, MOST_CV, gamma, poisson

COUNT = 20_000


def gaps(times):
    return np.diff((0.0, *times))


def dispersion(times, rate):
    """Variance over mean of the number of arrivals in windows that expect 10. It is 1 for Poisson."""
    counts, _ = np.histogram(times, np.arange(0, times[-1], 10 / rate))
    return counts.var() / counts.mean()


@pytest.mark.parametrize("rate", [0.2, 3.0, 500.0])
@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0, 2.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_asked_for(rate, cv):
    sample = gaps(gamma(rate, COUNT, cv, seed=1))
    standard_error = cv / rate / math.sqrt(COUNT)
    assert abs(sample.mean() - 1 / rate) < 5 * standard_error
    assert sample.std() / sample.mean() == pytest.approx(cv, rel=0.15)


def test_a_poisson_process_has_exponential_gaps_without_memory():
    sample = gaps(poisson(2.0, COUNT, seed=2))
    for length in (0.1, 0.5, 1.0, 2.0):  # P(gap > t) = exp(-rate t); a share's standard error is below 0.004
        assert abs((sample > length).mean() - math.exp(-2.0 * length)) < 0.02
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.04


def test_counts_are_even_below_cv_1_and_bursty_above():
    even, plain, bursty = (dispersion(gamma(5.0, COUNT, cv, seed=3), 5.0) for cv in (0.3, 1.0, 3.0))
    assert even < 0.4
    assert plain == pytest.approx(1.0, abs=0.2)
    assert bursty > 3


@given(
    rate=st.floats(1e-3, 1e6),
    count=st.integers(1, 50),
    cv=st.floats(LEAST_CV, MOST_CV),
    seed=st.integers(0, 2**64),
)
def test_any_process(rate, count, cv, seed):
    times = gamma(rate, count, cv, seed)
    assert len(times) == count
    assert all(type(at) is float and 0 <= at < math.inf for at in times)
    assert all(before <= after for before, after in itertools.pairwise(times))
    assert times == gamma(rate, count, cv, seed)
    assert gamma(rate, count + 1, cv, seed)[:count] == times  # a longer run begins the same way
    assert gamma(2 * rate, count, cv, seed) == pytest.approx([at / 2 for at in times])


def test_seeds_differ():
    assert len({poisson(1.0, 5, seed) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("rate", 0.0, "rate 0.0: allowed is above 0"),
        ("rate", -2.0, "rate -2.0: allowed is above 0"),
        ("rate", math.inf, "rate inf: allowed is above 0 requests a second, and finite"),
        ("rate", math.nan, "rate nan: allowed is above 0"),
        ("count", 0, "count 0: allowed is 1 or more"),
        ("cv", 0.0, "cv 0.0: allowed is from 0.01 to 100"),
        ("cv", 101.0, "cv 101.0: allowed is from 0.01 to 100"),
        ("cv", math.nan, "cv nan: allowed is from 0.01 to 100"),
        ("seed", -1, "seed -1: allowed is 0 or more"),
    ],
)
def test_values_that_are_not_allowed(setting, value, message):
    good = {"rate": 1.0, "count": 1, "cv": 1.0, "seed": 0}
    with pytest.raises(SettingError, match=message):
        gamma(**{**good, setting: value})
