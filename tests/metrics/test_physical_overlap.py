"""Overlap of traces that were worked out by hand, and against an integer grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.metrics.kernel_trace import KernelTrace
from deepinfer_lab.metrics.latency import Spread
from deepinfer_lab.metrics.overlap import Overlap, decode_covered_shares, dilation, speedup

P, D = "prefill", "decode"


def trace(*rows):
    """Rows of (phase, start, end) in µs, by start, and for what is no kernel its kind."""
    return KernelTrace(
        name=np.array(["k"] * len(rows), dtype=object),
        kind=np.array([kind[0] if kind else "kernel" for _, _, _, *kind in rows], dtype=object),
        stream=np.zeros(len(rows), dtype=np.int64),
        phase=np.array([phase for phase, *_ in rows], dtype=object),
        times=np.rint(np.array([(start, end) for _, start, end, *_ in rows]).reshape(-1, 2) * 1e3).astype(np.int64),
    )


def test_by_hand():
    found = Overlap.of(
        trace(
            (P, 0, 1000),
            (P, 500, 1500),  # on a second stream: the first 500 of it count once
            (D, 1200, 1400),  # inside
            (D, 1400, 1700),  # a third of it
            (None, 1700, 1800),
            (D, 2000, 2500),  # alone
        )
    )
    assert found.physical_overlap_ms == pytest.approx(0.3)
    assert found.prefill_busy_ms == pytest.approx(1.5)
    assert found.decode_busy_ms == pytest.approx(1.0)
    assert found.span_ms == pytest.approx(2.5)
    assert found.gpu_idle_share == pytest.approx(0.2 / 2.5)
    assert found.share == pytest.approx(0.3)
    assert found.decode_covered.max == 1
    assert found.decode_covered.p50 == pytest.approx(1 / 3)
    assert (found.prefill_kernels, found.decode_kernels, found.other_kernels) == (2, 3, 1)


@given(st.lists(st.tuples(st.sampled_from([P, D, None]), st.floats(0, 50), st.floats(0, 5)), max_size=30))
def test_control_one_stream_gives_exactly_nothing(rows):
    events, now = [], 0.1
    for phase, ran, idle in rows:
        events.append((phase, now, now + ran))
        now = now + ran + idle
    found = Overlap.of(trace(*events))
    assert found.physical_overlap_ms == 0
    assert found.share in (0, None)
    assert found.decode_covered is None or found.decode_covered.max == 0


def test_control_two_kernels_of_half_the_gpu_give_about_the_shorter_one():
    assert Overlap.of(trace((P, 0, 10_000), (D, 20, 8_000))).share == 1
    assert Overlap.of(trace((P, 0, 10_000), (D, 20, 10_020))).share == pytest.approx(0.998)
    assert Overlap.of(trace((P, 0, 10_000), (D, 10_000, 20_000))).share == 0  # a machine that serialises


kernels = st.lists(st.tuples(st.sampled_from([P, D, None]), st.integers(0, 40), st.integers(0, 15)), max_size=15)


@given(kernels)
def test_against_a_grid(rows):
    rows = [(phase, start, start + ran) for phase, start, ran in rows]
    cells = {phase: {n for p, a, b in rows if p == phase for n in range(a, b)} for phase in (P, D, None)}
    found = Overlap.of(trace(*rows))
    assert found.physical_overlap_ms == len(cells[P] & cells[D]) / 1e3
    assert (found.prefill_busy_ms, found.decode_busy_ms) == (len(cells[P]) / 1e3, len(cells[D]) / 1e3)
    span = max((b for _, _, b in rows), default=0) - min((a for _, a, _ in rows), default=0)
    assert found.span_ms == span / 1e3
    if span:
        assert found.gpu_idle_share == pytest.approx(1 - len(cells[P] | cells[D] | cells[None]) / span)
    else:
        assert found.gpu_idle_share is None
    shares = [len(set(range(a, b)) & cells[P]) / (b - a) for phase, a, b in rows if phase == D and a < b]
    assert decode_covered_shares(trace(*rows)).tolist() == pytest.approx(shares)


def test_copies_keep_the_gpu_from_being_idle_but_overlap_with_nothing():
    found = Overlap.of(trace((P, 0, 100), (D, 50, 90, "gpu_memcpy"), (D, 100, 150, "gpu_memset"), (D, 175, 200)))
    assert found.physical_overlap_ms == 0
    assert found.decode_busy_ms == 0.025
    assert found.decode_kernels == 1
    assert found.gpu_idle_share == pytest.approx(25 / 200)


def test_nothing_ran():
    found = Overlap.of(trace())
    assert found == Overlap(0, 0, 0, 0, None, None, 0, 0, 0)
    assert found.share is None


def test_only_plain_numbers_for_a_record():
    found = Overlap.of(trace((P, 0, 3), (D, 1, 2)))
    assert {type(value) for value in vars(found).values()} == {float, int, Spread}


ALONE_P, ALONE_D = trace((P, 0, 600)), trace((D, 0, 100), (D, 150, 250))
TOGETHER = trace((P, 0, 700), (D, 0, 150), (D, 200, 350))


def test_dilation_by_hand():
    assert dilation(ALONE_P, TOGETHER, P) == pytest.approx(700 / 600)
    assert dilation(ALONE_D, TOGETHER, D) == pytest.approx(300 / 200)  # busy time: the gap between does not count
    assert dilation(TOGETHER, TOGETHER, D) == 1
    assert dilation(ALONE_P, TOGETHER, D) is None


def test_speedup_by_hand():
    assert speedup(ALONE_P, ALONE_D, TOGETHER) == pytest.approx((600 + 250) / 700)  # spans: the gap counts
    assert speedup(ALONE_P, ALONE_D, trace((P, 0, 600), (D, 600, 850))) == 1
    assert speedup(ALONE_P, ALONE_D, trace()) is None
