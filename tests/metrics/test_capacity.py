"""Little's law, limits, and the parts of a TTFT, on cases small enough to check by hand and on random ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.engine.event import StepEvent
from deepinfer_lab.metrics.capacity import Slo, closed_loop_times, in_system, little, ttft_parts
from deepinfer_lab.metrics.latency import RequestTrace

TIMES = st.floats(0, 1e3)
STAYS = st.floats(1e-3, 1e3)


def trace(name: str, sent: float, *times: float, error: str | None = None) -> RequestTrace:
    return RequestTrace(name, 8, sent, times, error)


def step(phase: str, started: float, finished: float, *requests: str) -> StepEvent:
    return StepEvent(phase, "main", 0, started, finished, requests, 1)


@given(st.lists(st.tuples(TIMES, STAYS), min_size=1))
def test_little_holds_for_any_requests(requests):
    sent = [at for at, _ in requests]
    ended = [at + stay for at, stay in requests]
    found = little(sent, ended)
    assert found.mean_in_system == pytest.approx(found.rate * found.mean_time, rel=1e-9)
    _, count = in_system(sent, ended)
    assert count.min() >= 0
    assert count[-1] == 0


def test_counts_over_time():
    times, count = in_system([0, 1, 3], [2, 3, 4])
    assert times.tolist() == [0, 1, 2, 3, 4]
    assert count.tolist() == [1, 2, 1, 1, 0]  # at 3, one goes and another comes
    assert little([0, 1, 3], [2, 3, 4]).mean_in_system == pytest.approx((1 + 2 + 1 + 1) / 4)


@given(st.lists(STAYS, min_size=1, max_size=40), st.integers(1, 8))
def test_closed_loop_never_exceeds_its_clients_and_fills_them_while_it_can(durations, clients):
    sent, ended = closed_loop_times(durations, clients)
    assert sent == sorted(sent)
    _, count = in_system(sent, ended)
    assert count.max() <= clients
    assert little(sent, ended).mean_in_system <= clients + 1e-9
    assert sum(at == 0 for at in sent) == min(clients, len(durations))


def test_closed_loop_by_hand():
    sent, ended = closed_loop_times([4, 1, 2, 5], 2)
    assert sent == [0, 0, 1, 3]
    assert ended == [4, 1, 3, 8]
    assert little(sent, ended).mean_in_system == pytest.approx(12 / 8)  # one client alone from 4 to 8


@pytest.mark.parametrize(
    ("request_", "met"),
    [
        (trace("on time", 0, 1.0, 1.5, 2.0), True),
        (trace("late", 0, 1.1, 1.2, 1.3), False),
        (trace("slow", 0, 1.0, 1.6, 2.2), False),
        (trace("one token", 0, 1.0), True),
        (trace("none", 0), False),
        (trace("failed", 0, 0.1, 0.2, error="cancelled"), False),
    ],
)
def test_slo(request_, met):
    assert Slo(ttft=1.0, tpot=0.5).met(request_) is met


def test_parts_of_a_ttft():
    steps = [
        step("prefill", 2, 4, "a"), step("decode", 4, 5, "x"), step("prefill", 6, 7, "b"), step("prefill", 8, 9, "a"),
        step("decode", 10, 11, "a"), step("prefill", 12, 13, "a"),
    ]  # fmt: skip
    parts = ttft_parts(trace("a", 1.0, 9.5, 11.5), steps)
    assert parts is not None
    assert (parts.queue, parts.prefill, parts.beside, parts.idle, parts.first_token) == (1, 3, 2, 2, 0.5)
    assert math.fsum(vars(parts).values()) == pytest.approx(8.5)


def test_a_mixed_step_is_a_chunk_of_the_first_only():
    steps = [step("mixed", 0, 1, "b", "a"), step("mixed", 1, 3, "a", "b")]
    parts = ttft_parts(trace("a", 0.0, 3.0), steps)
    assert parts is not None
    assert (parts.queue, parts.prefill, parts.beside) == (1, 2, 0)


def test_no_token_or_no_step_has_no_parts():
    assert ttft_parts(trace("a", 0), [step("prefill", 0, 1, "a")]) is None
    assert ttft_parts(trace("a", 0, 1), [step("prefill", 0, 1, "b")]) is None
