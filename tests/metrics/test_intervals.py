"""Sets of time against the same sets as cells of an integer grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.metrics.intervals import covered, intersection, length, union

interval = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda each: (each[0], each[0] + each[1]))
intervals = st.lists(interval, max_size=12)


def array(each):
    return np.array(each, dtype=np.float64).reshape(-1, 2)


def cells(each):
    """The unit cells [n, n + 1) in some interval."""
    return {n for start, end in each for n in range(int(start), int(end))}


def is_a_set(each):
    """Not empty, in order, and not touching."""
    flat = each.ravel()
    return each.ndim == 2 and each.shape[1] == 2 and bool((flat[1:] > flat[:-1]).all())


@given(intervals)
def test_union(some):
    found = union(array(some))
    assert is_a_set(found)
    assert cells(found) == cells(some)
    assert length(found) == len(cells(some))


@given(intervals)
def test_union_of_a_set_is_the_set_and_order_does_not_matter(some):
    found = union(array(some))
    np.testing.assert_array_equal(union(found), found)
    np.testing.assert_array_equal(union(array(some[::-1])), found)


@given(intervals, intervals)
def test_intersection(some, others):
    a, b = union(array(some)), union(array(others))
    found = intersection(a, b)
    assert is_a_set(found)
    assert cells(found) == cells(some) & cells(others)
    np.testing.assert_array_equal(intersection(b, a), found)


@given(intervals)
def test_a_set_meets_itself_and_nothing_in_its_gaps(some):
    a = union(array(some))
    gaps = np.stack([a[:-1, 1], a[1:, 0]], axis=1)
    np.testing.assert_array_equal(intersection(a, a), a)
    assert len(intersection(a, gaps)) == 0


@given(intervals, intervals)
def test_covered(some, others):
    found = covered(array(some), union(array(others)))
    assert found.tolist() == [len(cells([each]) & cells(others)) for each in some]


@given(st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=2, max_size=30, unique=True))
def test_what_only_touches_overlaps_by_exactly_nothing(times):
    times = np.sort(times)
    turns = np.stack(
        [times[:-1], times[1:]], axis=1
    )  # one after the other, without a gap, at times that are no round numbers
    even, odd = union(turns[::2]), union(turns[1::2])
    assert length(intersection(even, odd)) == 0
    assert (covered(turns[1::2], even) == 0).all()
    np.testing.assert_array_equal(union(turns), [[times[0], times[-1]]])


def test_an_interval_inside_of_a_long_one_does_not_end_it():
    assert union(array([(0, 10), (1, 2), (9, 11), (20, 21)])).tolist() == [[0, 11], [20, 21]]


@pytest.mark.parametrize("some", [[], [(3, 3)], [(3, 3), (5, 5)]])
def test_nothing(some):
    empty, other = union(array(some)), union(array([(0, 9)]))
    assert empty.shape == (0, 2)
    assert length(empty) == 0
    assert intersection(empty, other).shape == intersection(empty, empty).shape == (0, 2)
    assert covered(array([(1, 2)]), empty).tolist() == [0]
    assert covered(empty, other).shape == (0,)


def test_an_interval_that_ends_before_it_starts_is_a_fault():
    with pytest.raises(AssertionError, match="ends before it starts"):
        union(array([(0, 1), (3, 2)]))


def test_a_million_kernels():
    start = np.sort(np.random.default_rng(0).integers(0, 10**7, 10**6)).astype(np.float64)
    kernels = np.stack([start, start + 7], axis=1)
    p, d = union(kernels[::2]), union(kernels[1::2])
    both = length(p) + length(d) - length(union(kernels))  # |P| + |D| = |P or D| + |P and D|
    assert length(intersection(p, d)) == both
    assert covered(d, p).sum() == pytest.approx(both)
