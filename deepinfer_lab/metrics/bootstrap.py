"""How sure the ratio of two samples is: the percentile bootstrap.

Samples are drawn as if they were independent of each other. What differs from one run to the next, such as clocks and
neighbours, is not in them, and so not in the interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST = 5  # of samples: fewer say too little of how they spread


@dataclass(frozen=True)
class Statistic:
    """What stands for a sample: its mean, or a quantile (0 to 1) by linear interpolation between order statistics."""

    name: str
    quantile: float | None  # None is the mean

    def of(self, values: Sequence[float]) -> float:
        return float(np.mean(values) if self.quantile is None else np.quantile(values, self.quantile))

    def resampled(self, values: Sequence[float], random: np.random.Generator) -> np.ndarray:
        """The statistic of each of `RESAMPLES` draws with replacement, [RESAMPLES]."""
        if self.quantile is None:
            return random.choice(np.asarray(values), (RESAMPLES, len(values))).mean(axis=1)
        return _resampled_quantile(np.sort(values), self.quantile, random)


MEDIAN, P99, MEAN = Statistic("median", 0.5), Statistic("p99", 0.99), Statistic("mean", None)


def ratio_interval(
    a: Sequence[float], b: Sequence[float], statistic: Statistic, random: np.random.Generator
) -> tuple[float, float] | None:
    """The interval that holds b's statistic over a's with `CONFIDENCE`.

    Returns:
        Its ends, or None: a sample of fewer than `LEAST` values, or one that holds values that are not positive.
    """
    if min(len(a), len(b)) < LEAST or min(*a, *b) <= 0:
        return None
    ratios = statistic.resampled(b, random) / statistic.resampled(a, random)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _resampled_quantile(ordered: np.ndarray, quantile: float, random: np.random.Generator) -> np.ndarray:
    """Without drawing all n values: only the one or two order statistics that the quantile lies between.

    A draw with replacement takes `ordered[floor(n * u)]` for n uniform u. The r-th smallest u is distributed as
    Beta(r, n + 1 - r); those above it are uniform between it and 1, and the smallest of them is the next.
    """
    n = len(ordered)
    position = quantile * (n - 1)
    below = int(position)  # counted from 0
    u = random.beta(below + 1, n - below, RESAMPLES)
    above = n - below - 1
    after = u + (1 - u) * random.beta(1, above, RESAMPLES) if above else u
    low, high = (ordered[np.minimum((each * n).astype(int), n - 1)] for each in (u, after))
    return low + (position - below) * (high - low)
