"""When the requests of an open loop are due: renewal processes, whose gaps are independent and alike."""

import math

import numpy as np

from deepinfer_lab.errors import SettingError

LEAST_CV, MOST_CV = 0.01, 100.0  # nearly even; nearly all gaps too small for a float


def poisson(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Arrivals that know nothing of each other: exponential gaps, which are gamma gaps of cv 1. Otherwise as `gamma`."""
    return gamma(rate, count, 1.0, seed)


def gamma(rate: float, count: int, cv: float, seed: int) -> tuple[float, ...]:
    """Arrivals with gamma-distributed gaps of mean 1 / rate and any coefficient of variation: bursty where it is above 1.

    A gamma distribution has mean shape * scale and variance shape * scale**2. So shape = 1 / cv**2 and
    scale = cv**2 / rate give the mean 1 / rate and the standard deviation cv / rate.

    Args:
        rate: requests a second, in the long run.
        count: how many arrivals.
        cv: standard deviation of the gaps over their mean. 1 is Poisson; towards 0 arrivals become even.
        seed: the same seed gives the same times.

    Returns:
        `count` times in seconds, nondecreasing. The first comes one gap after 0.

    Raises:
        SettingError: a value outside its range.
    """
    for name, value, allowed, ok in (
        ("rate", rate, "above 0 requests a second, and finite", 0 < rate < math.inf),
        ("count", count, "1 or more", count >= 1),
        ("cv", cv, f"from {LEAST_CV} to {MOST_CV}", LEAST_CV <= cv <= MOST_CV),
        ("seed", seed, "0 or more", seed >= 0),
    ):
        if not ok:
            raise SettingError(f"{name} {value}: allowed is {allowed}")
    gaps = np.random.default_rng(seed).gamma(1 / cv**2, cv**2 / rate, count)
    return tuple(np.cumsum(gaps).tolist())
