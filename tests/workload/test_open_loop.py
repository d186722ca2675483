"""The open-loop client: it keeps to its schedule, says when it could not, and stops when a run has failed."""

import dataclasses
import itertools
import math
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import FinishEvent, TokenEvent
from deepinfer_lab.engine.handle import RequestHandle
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import EngineClosed, InvalidSampling, NonFiniteLogits, SettingError
from deepinfer_lab.metrics.latency import RequestTrace, summarise
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named
from deepinfer_lab.workload.arrivals import poisson
from deepinfer_lab.workload.open_loop import OpenLoopResult, open_loop

HOLD_S = 0.1  # how long a request of `capped` stays


class FakeEngine:
    """Requests end when the test says so: `on_submit(engine, handle)` decides."""

    tokenizer = None

    def __init__(self, on_submit) -> None:
        self.on_submit = on_submit
        self.handles: list[RequestHandle] = []
        self.live: set[str] = set()
        self.most = 0
        self.cancelled = False
        self.lock = threading.Lock()

    def submit(self, prompt, params, request_id):
        handle = RequestHandle(Request(request_id, tuple(prompt), params))
        with self.lock:
            self.handles.append(handle)
            self.live.add(request_id)
            self.most = max(self.most, len(self.live))
        if self.cancelled:
            self.end(handle, FinishReason.CANCELLED)
        else:
            self.on_submit(self, handle)
        return handle

    def end(self, handle, reason=FinishReason.LENGTH, error=None):
        name = handle.request.id
        with self.lock:
            self.live.discard(name)
        if reason is FinishReason.LENGTH:
            handle.put(TokenEvent(name, 1, 0.0))
        handle.put(FinishEvent(name, reason, 0.0, error))

    def cancel_all(self):
        self.cancelled = True
        for handle in self.handles:
            if handle.request.id in self.live:
                self.end(handle, FinishReason.CANCELLED)


def at_once(engine, handle):
    engine.end(handle)


def never(engine, handle):
    pass


def requests(count):
    return [([i + 1], 1) for i in range(count)]


@pytest.fixture
def real_engine():
    source = SyntheticSource(dataclasses.replace(SHAPES["tiny"], tied_embeddings=False), "tiny")
    model = build_decoder(source, plan_named("none"), group=64, device=torch.device("cpu"), dtype=torch.float32)
    with Engine(model, config=EngineConfig(kv_cache_mib=1, chunk_tokens=8)) as engine:
        yield engine


def test_nothing_that_runs_holds_a_request_up():
    """No request ends before the last one was sent. A client with any limit would wait until all are cancelled."""

    def all_at_the_end(engine, _handle):
        if len(engine.handles) == 40:
            for handle in engine.handles:
                engine.end(handle)

    engine = FakeEngine(all_at_the_end)
    patience = threading.Timer(60, engine.cancel_all)
    patience.start()
    result = open_loop(engine, requests(40), [0.0] * 40)
    patience.cancel()
    assert engine.most == 40
    assert [trace.error for trace in result.traces] == [None] * 40


def test_each_request_has_its_own_length():
    engine = FakeEngine(at_once)
    result = open_loop(engine, [([1, 2], 5), ([3], 9)], [0.0, 0.0], name="load")
    sent = [handle.request for handle in engine.handles]
    assert [(each.prompt, each.params.max_tokens, each.params.ignore_eos) for each in sent] == [
        ((1, 2), 5, True),
        ((3,), 9, True),
    ]
    assert [trace.request_id for trace in result.traces] == ["load-0", "load-1"]
    assert [trace.prompt_tokens for trace in result.traces] == [2, 1]


def test_nothing_is_sent_before_it_is_due():
    due = [0.0, 0.03, 0.03, 0.08]
    result = open_loop(FakeEngine(at_once), requests(4), due)
    assert [trace.sent for trace in result.traces] == due
    assert all(at >= planned for at, planned in zip(result.submitted, due, strict=True))


@pytest.fixture(scope="module")
def capped():
    """Four requests at 1,000 a second, one at a time, each of which stays for HOLD_S after it was sent."""

    def later(engine, handle):
        threading.Timer(HOLD_S, engine.end, [handle]).start()

    engine = FakeEngine(later)
    return engine, open_loop(engine, requests(4), [0.0, 0.001, 0.002, 0.003], max_concurrency=1)


def test_a_cap_makes_a_lower_rate_and_the_result_says_so(capped):
    engine, result = capped
    assert engine.most == 1
    assert result.offered_rate == pytest.approx(1000)
    assert result.achieved_rate < 1.1 / HOLD_S  # a slower machine only lowers it
    assert result.max_lateness > 2.9 * HOLD_S


def test_what_waits_for_the_cap_waits_in_the_users_eyes(capped):
    """TTFT counts from when a request was due, or the client would hide the queue that it made itself."""
    _, result = capped
    assert result.traces[3].ttft > 3.9 * HOLD_S


def test_a_cap_that_is_wide_enough_changes_nothing():
    result = open_loop(FakeEngine(at_once), requests(6), [0.0] * 6, max_concurrency=6)
    assert len(result.submitted) == 6


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0, 0.004), max_size=12).map(sorted), st.none() | st.integers(1, 3), st.sampled_from([0, 0.001])
)
def test_any_schedule_is_kept_in_order(due, cap, hold):
    def soon(engine, handle):
        threading.Timer(hold, engine.end, [handle]).start()

    engine = FakeEngine(soon)
    result = open_loop(engine, requests(len(due)), due, max_concurrency=cap)
    assert [trace.request_id for trace in result.traces] == [f"request-{i}" for i in range(len(due))]
    assert [trace.sent for trace in result.traces] == due
    assert len(result.submitted) == len(due)
    assert all(at >= planned for at, planned in zip(result.submitted, due, strict=True))
    assert all(before <= after for before, after in itertools.pairwise(result.submitted))
    assert engine.most <= (cap or len(due))


def test_times_count_from_the_origin():
    origin = time.perf_counter() - 100
    result = open_loop(FakeEngine(at_once), requests(2), [1.0, 2.0], origin=origin)
    assert [trace.sent for trace in result.traces] == [1.0, 2.0]
    assert result.submitted[0] >= 100
    assert result.max_lateness >= 98
    assert result.traces[0].token_times[0] >= result.submitted[0]


@pytest.mark.parametrize("cap", [None, 1])
def test_a_request_that_fails_ends_the_run_though_the_next_is_due_in_a_year(cap):
    def fails(engine, handle):
        engine.end(handle, FinishReason.ERROR, NonFiniteLogits("NaN"))

    engine = FakeEngine(fails)
    with pytest.raises(NonFiniteLogits):
        open_loop(engine, requests(2), [0.0, 3e7], max_concurrency=cap)
    assert engine.cancelled
    assert len(engine.handles) == 1


def test_a_failure_reaches_who_waits_for_room():
    """One of two requests fails while the third waits for either of them; it is not sent into the room that this makes."""

    def second_fails(engine, handle):
        if len(engine.handles) == 2:
            threading.Timer(0.05, engine.end, [handle, FinishReason.ERROR, NonFiniteLogits("NaN")]).start()

    engine = FakeEngine(second_fails)
    with pytest.raises(NonFiniteLogits):
        open_loop(engine, requests(3), [0.0] * 3, max_concurrency=2)
    assert len(engine.handles) == 2
    assert not engine.live  # the first one was cancelled


@pytest.mark.parametrize("error", [EngineClosed("it died"), KeyboardInterrupt()])
def test_what_breaks_the_sender_cancels_what_runs(error):
    def breaks(engine, _handle):
        if len(engine.handles) == 3:
            raise error

    engine = FakeEngine(breaks)
    with pytest.raises(type(error)):
        open_loop(engine, requests(5), [0.0] * 5)
    assert engine.cancelled
    assert not engine.live - {"request-2"}


def test_on_a_real_engine(real_engine):
    lengths = [1 + i % 5 for i in range(20)]
    due = poisson(400, 20, seed=0)
    result = open_loop(real_engine, [([i] * (1 + i % 3), n) for i, n in enumerate(lengths)], due)
    assert [len(trace.token_times) for trace in result.traces] == lengths
    assert all(trace.error is None and trace.ttft > 0 for trace in result.traces)
    assert result.offered_rate == pytest.approx(19 / (due[-1] - due[0]))
    assert summarise(result.traces).requests == 20


@pytest.mark.parametrize("cap", [None, 1])
def test_a_refused_request_is_a_trace_with_an_error_and_leaves_its_place(real_engine, cap):
    asked = [([1, 2], 2), ([], 2), ([999], 2), ([3] * 400, 400), ([4], 3)]
    result = open_loop(real_engine, asked, [0.0] * 5, max_concurrency=cap)
    assert [(trace.error or "").split(":")[0] for trace in result.traces] == [
        "",
        "EmptyPrompt",
        "InvalidToken",
        "ContextOverflow",
        "",
    ]
    assert [trace.prompt_tokens for trace in result.traces] == [2, 0, 1, 400, 1]
    assert len(result.submitted) == 5


def test_a_cancelled_request_is_no_success():
    engine = FakeEngine(lambda engine, handle: engine.end(handle, FinishReason.CANCELLED))
    assert open_loop(engine, requests(1), [0.0]).traces[0].error == "cancelled"


def test_no_requests():
    result = open_loop(FakeEngine(never), [], [])
    assert result == OpenLoopResult((), ())
    assert (result.offered_rate, result.achieved_rate, result.max_lateness) == (None, None, 0.0)


def test_rates_are_gaps_over_their_time():
    traces = tuple(RequestTrace(f"r{i}", 1, 10.0 + i, ()) for i in range(4))
    late = OpenLoopResult(traces, (10.0, 12.0, 14.0, 16.0))
    assert (late.offered_rate, late.achieved_rate, late.max_lateness) == (1.0, 0.5, 3.0)
    punctual = OpenLoopResult(traces, (10.0, 11.0, 12.0, 13.0))
    assert punctual.achieved_rate == punctual.offered_rate == 1.0


def test_one_request_and_one_burst_have_no_rate():
    one = OpenLoopResult((RequestTrace("a", 1, 5.0, ()),), (5.5,))
    assert (one.offered_rate, one.achieved_rate, one.max_lateness) == (None, None, 0.5)
    burst = OpenLoopResult(tuple(RequestTrace("a", 1, 0.0, ()) for _ in range(3)), (0.0, 1.0, 2.0))
    assert (burst.offered_rate, burst.achieved_rate) == (None, 1.0)


@pytest.mark.parametrize(
    ("due", "cap", "message"),
    [
        ([0.0], None, "1 due times: allowed are 2, one for each request"),
        ([0.0, 1.0, 2.0], None, "3 due times: allowed are 2"),
        ([2.0, 1.0], None, "due time 1.0 of request 1: allowed is 2.0"),
        ([-1.0, 1.0], None, "due time -1.0 of request 0: allowed is 0 or more"),
        ([0.0, math.nan], None, "due time nan of request 1"),
        ([0.0, math.inf], None, "due time inf of request 1"),
        ([0.0, 1.0], 0, "max_concurrency 0: allowed is 1 or more, or None"),
    ],
)
def test_settings_that_are_not_allowed(due, cap, message):
    engine = FakeEngine(at_once)
    with pytest.raises(SettingError, match=message):
        open_loop(engine, requests(2), due, max_concurrency=cap)
    assert not engine.handles


def test_a_length_that_is_not_allowed_is_found_before_anything_is_sent():
    engine = FakeEngine(at_once)
    with pytest.raises(InvalidSampling, match="max_tokens"):
        open_loop(engine, [([1], 3), ([2], 0)], [0.0, 0.0])
    assert not engine.handles
