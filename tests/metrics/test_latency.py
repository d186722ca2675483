"""Latency figures of traces that were worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.metrics.latency import RequestTrace, Spread, summarise

# Sent at 1.0; tokens at 1.5, 1.6, 1.9, 2.0.
FOUR = RequestTrace("four", 10, 1.0, (1.5, 1.6, 1.9, 2.0))
# Sent at 2.0; one token at 5.0.
ONE = RequestTrace("one", 3, 2.0, (5.0,))
REFUSED = RequestTrace("refused", 900, 0.5, (), "ContextOverflow: too long")
BROKEN = RequestTrace("broken", 5, 0.0, (6.0, 60.0), "EngineClosed: died")


def test_one_request_by_hand():
    assert FOUR.ttft == pytest.approx(0.5)
    assert FOUR.itl == pytest.approx([0.1, 0.3, 0.1])
    assert FOUR.tpot == pytest.approx(0.5 / 3)
    assert FOUR.e2e == pytest.approx(1.0)


def test_tpot_is_what_its_definition_says():
    assert FOUR.tpot == pytest.approx((FOUR.e2e - FOUR.ttft) / (4 - 1))
    assert FOUR.tpot == pytest.approx(sum(FOUR.itl) / 3)


def test_a_single_token_has_no_tpot_and_no_gaps():
    assert (ONE.ttft, ONE.e2e) == (3.0, 3.0)
    assert ONE.tpot is None
    assert ONE.itl == []


def test_no_token_at_all():
    assert (REFUSED.ttft, REFUSED.e2e, REFUSED.tpot, REFUSED.itl) == (None, None, None, [])


def test_summary_by_hand():
    summary = summarise([FOUR, REFUSED, ONE, BROKEN])
    assert (summary.requests, summary.errors, summary.output_tokens) == (2, 2, 5)
    assert summary.output_tokens_per_s == pytest.approx(5 / (5.0 - 1.0))
    assert summary.ttft.p50 == pytest.approx((0.5 + 3.0) / 2)
    assert summary.ttft.max == pytest.approx(3.0)
    assert summary.tpot == Spread(*[pytest.approx(0.5 / 3)] * 4)  # `ONE` has none
    assert summary.itl.p50 == pytest.approx(0.1)
    assert summary.itl.max == pytest.approx(0.3)  # never the 0.5 or 3.0 before a first token
    assert summary.e2e.p50 == pytest.approx(2.0)


@pytest.mark.parametrize("traces", [[], [REFUSED], [BROKEN], [REFUSED, BROKEN]])
def test_nothing_that_ended_well(traces):
    summary = summarise(traces)
    assert (summary.requests, summary.errors, summary.output_tokens, summary.output_tokens_per_s) == (
        0,
        len(traces),
        0,
        0.0,
    )
    assert (summary.ttft, summary.tpot, summary.itl, summary.e2e) == (None,) * 4


def test_only_single_tokens():
    summary = summarise([ONE])
    assert summary.tpot is None
    assert summary.itl is None
    assert summary.ttft == Spread(3.0, 3.0, 3.0, 3.0)
    assert summary.output_tokens_per_s == pytest.approx(1 / 3)


def test_a_request_without_error_and_without_tokens_did_not_end_well():
    assert summarise([RequestTrace("cancelled", 4, 0.0, ()), FOUR]).errors == 1


def test_order_does_not_matter():
    traces = [FOUR, REFUSED, ONE, BROKEN]
    assert summarise(traces) == summarise(traces[::-1])


def test_spread_by_hand():
    spread = Spread.of([float(value) for value in range(1, 102)])  # 1 .. 101: the q-th percentile is q + 1
    assert (spread.p50, spread.p95, spread.p99, spread.max) == (51.0, 96.0, 100.0, 101.0)


def test_spread_interpolates():
    assert Spread.of([0.0, 1.0]) == Spread(0.5, 0.95, 0.99, 1.0)


def test_spread_of_one_and_none():
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert Spread.of([]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_spread_is_ordered_and_holds_plain_floats(values):
    spread = Spread.of(values)
    assert spread.p50 <= spread.p95 <= spread.p99 <= spread.max == max(values)
    assert all(type(value) is float for value in vars(spread).values())
    assert spread == Spread.of(values[::-1])
    assert not any(isinstance(value, np.generic) for value in vars(spread).values())
