import numpy as np
import pytest

from deepinfer_lab.metrics.bootstrap import LEAST, MEAN, MEDIAN, P99, RESAMPLES, Statistic, ratio_interval


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("count", [1, 2, 5, 20, 21, 400])
@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.99, 1.0])
def test_order_statistics_are_distributed_as_those_of_whole_resamples(count: int, quantile: float):
    values = draw(1).lognormal(size=count)
    shortcut = np.concatenate([Statistic("q", quantile).resampled(values, draw(seed)) for seed in range(5)])
    whole = np.quantile(draw(9).choice(values, (5 * RESAMPLES, count)), quantile, axis=1)
    shortcut, whole = np.sort(shortcut.round(9)), np.sort(whole.round(9))  # interpolation rounds in either its own way
    at = np.concatenate([shortcut, whole])
    gap = np.searchsorted(shortcut, at, "right") - np.searchsorted(whole, at, "right")
    assert np.abs(gap).max() / len(whole) < 2.5 * np.sqrt(2 / len(whole))  # Kolmogorov and Smirnov, at 1e-5


@pytest.mark.parametrize(("statistic", "expected"), [(MEDIAN, 3.0), (MEAN, 22.0), (P99, 96.16)])
def test_statistics_are_what_they_are_called(statistic: Statistic, expected: float):
    assert statistic.of([1, 2, 3, 4, 100]) == pytest.approx(expected)


@pytest.mark.parametrize("statistic", [MEDIAN, MEAN], ids=lambda s: s.name)
def test_the_interval_holds_the_truth_about_as_often_as_it_says(statistic: Statistic):
    random, inside = draw(3), 0
    for _ in range(300):
        a, b = random.normal(10, 1, 40), random.normal(12, 1, 40)
        low, high = ratio_interval(a, b, statistic, random)
        inside += low <= 1.2 <= high
    assert 0.90 <= inside / 300 <= 0.99


def test_the_interval_is_the_same_for_the_same_seed_and_narrows_with_samples():
    a, b = draw(1).normal(10, 1, 30), draw(2).normal(10, 1, 30)
    first = ratio_interval(a, b, MEDIAN, draw())
    assert ratio_interval(a, b, MEDIAN, draw()) == first
    assert ratio_interval(a, b, MEDIAN, draw(1)) != first
    low, high = ratio_interval(np.tile(a, 50), np.tile(b, 50), MEDIAN, draw())
    assert high - low < (first[1] - first[0]) / 3


def test_no_interval_where_there_is_too_little_or_a_ratio_means_nothing():
    enough = [1.0] * LEAST
    assert ratio_interval(enough, [2.0] * LEAST, MEDIAN, draw()) == (2.0, 2.0)
    for other in ([1.0] * (LEAST - 1), [1.0] * LEAST + [0.0], [1.0] * LEAST + [-1.0]):
        assert ratio_interval(enough, other, MEDIAN, draw()) is None
        assert ratio_interval(other, enough, MEDIAN, draw()) is None
