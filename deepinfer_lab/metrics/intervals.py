"""Sets of time as half-open intervals [start, end) in arrays [N, 2]. All is vectorised: a trace may hold 10^6 kernels.

A *set* here is what `union` returns: intervals that are not empty, do not touch, and are in order. Ends are compared and
copied, never computed, so that intervals which only touch overlap by exactly 0.
"""

import numpy as np


def union(intervals: np.ndarray) -> np.ndarray:
    """The set of all times in at least one of the intervals.

    Args:
        intervals: [N, 2] in any order; they may overlap. Empty ones add nothing.

    Returns:
        A set, [M, 2].
    """
    assert (intervals[:, 0] <= intervals[:, 1]).all(), "an interval ends before it starts"
    start, end = intervals[intervals[:, 0] < intervals[:, 1]].T
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    gap = start[1:] > reach[:-1]  # after these, nothing that began before is still running
    first, last = np.concatenate([[True], gap]), np.concatenate([gap, [True]])
    return np.stack([start[first[: len(start)]], reach[last[: len(start)]]], axis=1)


def intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The set of all times in both sets, [K, 2]."""
    time = np.concatenate([a[:, 0], b[:, 0], a[:, 1], b[:, 1]])
    change = np.repeat([1, -1], len(a) + len(b))
    order = np.lexsort([change, time])  # at one time, ends before starts
    both = np.flatnonzero(change[order].cumsum() == 2)  # neither set overlaps itself, so that 2 means one of each
    return np.stack([time[order[both]], time[order[both + 1]]], axis=1)


def length(intervals: np.ndarray) -> float:
    """Total length of a set."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def covered(intervals: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """How much of each interval lies in a set.

    Args:
        intervals: [N, 2] in any order; they may overlap. cover: a set, [M, 2].

    Returns:
        Lengths, float64 [N].
    """
    if not len(cover):
        return np.zeros(len(intervals))
    # The length of the cover before time t rises by 1 inside of it and stands still outside: straight lines between its ends.
    before = np.concatenate([[0], (cover[:, 1] - cover[:, 0]).cumsum()]).repeat(2)[1:-1]
    return np.interp(intervals[:, 1], cover.ravel(), before) - np.interp(intervals[:, 0], cover.ravel(), before)
