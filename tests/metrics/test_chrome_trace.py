"""The rules of the Trace Event Format, for a run by hand, for runs of any shape, and for an engine's own."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.policy import POLICIES
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import RequestFailed, SettingError
from deepinfer_lab.metrics.chrome_trace import TraceRecorder, trace_events, write
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named

T0 = 5_000.25  # perf_counter counts from some time long ago


def step(lane, started, finished, requests, phase="decode", tokens=1, cycle=1):
    return StepEvent(phase, lane, cycle, T0 + started, T0 + finished, tuple(requests), tokens)


def token(request, time, value=7):
    return TokenEvent(request, value, T0 + time)


def end(request, time, reason=FinishReason.LENGTH, error=None):
    return FinishEvent(request, reason, T0 + time, error)


RUN = [
    step("prefill", 0.0, 0.002, ["a"], "prefill", 256),
    token("a", 0.002, 42),
    step("prefill", 0.002, 0.005, ["b"], "prefill", 100, cycle=2),
    step("decode", 0.0021, 0.003, ["a"], cycle=2),
    token("a", 0.003),
    token("b", 0.005),
    step("decode", 0.005, 0.006, ["a", "b"], tokens=2, cycle=3),
    token("a", 0.006),
    end("a", 0.0061, FinishReason.STOP),
    token("b", 0.006),
    end("b", 0.0062),
]


def of_phase(trace, *phs):
    return [event for event in trace if event["ph"] in phs]


def ns(event):
    """Start and end in whole nanoseconds."""
    return round(event["ts"] * 1e3), round((event["ts"] + event.get("dur", 0)) * 1e3)


def rows(trace):
    return {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}


def check(trace):
    """What viewers rely on."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    names = rows(trace)
    slices = defaultdict(list)
    for event in trace:
        assert event["pid"] == 1
        assert event["tid"] in names  # nobody is without a name
        if event["ph"] != "M":
            assert event["ts"] >= 0
    for event in of_phase(trace, "X"):
        assert event["dur"] >= 0
        slices[event["tid"]].append(event)
    for row in slices.values():  # one after the other: nested properly, since nothing is nested
        times = sorted(map(ns, row))
        assert all(later[0] >= earlier[1] for earlier, later in pairwise(times))
    check_flows(trace, slices)
    check_requests(trace)


def check_flows(trace, slices):
    flows = defaultdict(list)
    for event in of_phase(trace, "s", "t", "f"):
        flows[event["id"]].append(event)
        inside = [s for s in slices[event["tid"]] if ns(s)[0] <= ns(event)[0] <= ns(s)[1]]
        assert any(event["name"] in s["args"]["requests"] for s in inside)
        assert event["bp"] == "e"
    for flow in flows.values():
        phs = [event["ph"] for event in sorted(flow, key=lambda event: event["ts"])]
        assert phs == ["s", *["t"] * (len(flow) - 2), "f"]
        assert len({(event["name"], event["cat"]) for event in flow}) == 1  # or viewers take them for two flows


def check_requests(trace):
    begins, ends = of_phase(trace, "b"), of_phase(trace, "e")
    assert len({event["id"] for event in begins}) == len(begins)
    pairs = list(zip(begins, ends, strict=True))
    for begin, close in pairs:
        assert all(begin[key] == close[key] for key in ("id", "cat", "name", "tid"))
        assert begin["ts"] <= close["ts"]


def test_a_run_by_hand():
    trace = trace_events(RUN)
    check(trace)
    assert rows(trace) == {1: "client", 2: "prefill", 3: "decode"}
    slices = [(rows(trace)[e["tid"]], e["name"], *ns(e), e["args"]) for e in of_phase(trace, "X")]
    assert slices == [
        ("prefill", "prefill 256 tok", 0, 2_000_000, {"cycle": 1, "requests": ["a"], "tokens": 256}),
        ("prefill", "prefill 100 tok", 2_000_000, 5_000_000, {"cycle": 2, "requests": ["b"], "tokens": 100}),
        ("decode", "decode 1 rows", 2_100_000, 3_000_000, {"cycle": 2, "requests": ["a"], "tokens": 1}),
        ("decode", "decode 2 rows", 5_000_000, 6_000_000, {"cycle": 3, "requests": ["a", "b"], "tokens": 2}),
    ]
    flows = [(e["name"], e["ph"], rows(trace)[e["tid"]], ns(e)[0]) for e in of_phase(trace, "s", "t", "f")]
    assert flows == [
        ("a", "s", "prefill", 0),
        ("a", "t", "decode", 2_100_000),
        ("a", "f", "decode", 5_000_000),
        ("b", "s", "prefill", 2_000_000),
        ("b", "f", "decode", 5_000_000),
    ]
    requests = [(e["name"], e["ph"], ns(e)[0]) for e in of_phase(trace, "b", "e")]
    assert requests == [("a", "b", 0), ("a", "e", 6_100_000), ("b", "b", 2_000_000), ("b", "e", 6_200_000)]
    assert [e["args"]["reason"] for e in of_phase(trace, "e")] == ["stop", "length"]
    instants = [(e["name"], ns(e)[0], e["args"]["token"]) for e in of_phase(trace, "i")]
    assert instants[0] == ("a", 2_000_000, 42)
    assert Counter(name for name, *_ in instants) == {"a": 3, "b": 2}


def test_order_of_events_does_not_matter():
    assert sorted(map(json.dumps, trace_events(RUN[::-1]))) == sorted(map(json.dumps, trace_events(RUN)))


def test_steps_of_a_lane_that_overlap_get_rows_of_their_own():
    trace = trace_events(
        [step("async", 0, 3, "a"), step("async", 1, 2, "b"), step("async", 2, 5, "c"), step("async", 3, 4, "d")]
    )
    check(trace)
    where = {e["args"]["requests"][0]: rows(trace)[e["tid"]] for e in of_phase(trace, "X")}
    assert where == {"a": "async", "b": "async (2)", "c": "async (2)", "d": "async"}


def test_one_step_needs_no_arrow_but_has_its_request():
    trace = trace_events([step("l", 0, 1, "a"), end("a", 1)])
    check(trace)
    assert of_phase(trace, "s", "t", "f") == []
    assert [ns(e)[0] for e in of_phase(trace, "b", "e")] == [0, 10**9]


def test_a_request_that_ended_before_any_step_and_one_that_has_no_end_yet():
    error = RequestFailed("too bad")
    trace = trace_events([step("l", 1, 2, ["runs"]), token("runs", 2), end("dead", 0.5, FinishReason.ERROR, error)])
    check(trace)
    ends = {e["name"]: e for e in of_phase(trace, "e")}
    assert ends["dead"]["ts"] == 0
    assert ends["dead"]["args"] == {"reason": "error", "error": repr(error)}
    assert ns(ends["runs"]) == (1_500_000_000,) * 2
    assert ends["runs"]["args"] == {}


def test_an_id_that_is_used_again_is_another_request():
    trace = trace_events(
        [
            step("l", 0, 1, "x"),
            step("l", 1, 3, "x"),
            end("x", 2, FinishReason.CANCELLED),  # while its step was in flight
            step("l", 3, 4, "x"),
            step("l", 4, 5, "x"),
            end("x", 5),
        ]
    )
    check(trace)
    assert [(e["id"], e["ph"], ns(e)[0] // 10**9) for e in of_phase(trace, "s", "f")] == [
        (1, "s", 0),
        (1, "f", 1),
        (2, "s", 3),
        (2, "f", 4),
    ]
    assert [ns(e)[0] // 10**9 for e in of_phase(trace, "b", "e")] == [0, 2, 3, 5]


def test_no_events():
    trace = trace_events([])
    check(trace)
    assert of_phase(trace, "X", "i", "b", "e", "s", "t", "f") == []


times = st.floats(0, 3, allow_subnormal=False)
names = st.sampled_from("abcd")
any_event = st.one_of(
    st.builds(
        lambda lane, start, took, who, phase: step(lane, start, start + took, sorted(who), phase, 3),
        st.sampled_from(["one", "two"]),
        times,
        times,
        st.sets(names, min_size=1),
        st.sampled_from(["prefill", "decode", "mixed"]),
    ),
    st.builds(token, names, times),
    st.builds(end, names, times, st.sampled_from(FinishReason)),
)


@given(st.lists(any_event, max_size=25))
def test_runs_of_any_shape(events):
    trace = trace_events(events)
    check(trace)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert len(of_phase(trace, "X")) == len(steps)
    assert len(of_phase(trace, "i")) == sum(isinstance(event, TokenEvent) for event in events)
    assert len(of_phase(trace, "b")) >= len({name for each in steps for name in each.request_ids})
    # Each step of each request is a station of its flow, unless it is the only one.
    stations = Counter(event["id"] for event in of_phase(trace, "s", "t", "f"))
    alone = len(of_phase(trace, "b")) - len(stations)
    taken = sum(len(each.request_ids) for each in steps)
    assert 0 <= taken - sum(stations.values()) <= alone


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_run_of_an_engine(policy):
    shape = SyntheticSource(SHAPES["tiny"], "tiny")
    model = build_decoder(shape, plan_named("none"), group=64, device=torch.device("cpu"), dtype=torch.float32)
    recorder = TraceRecorder()
    with Engine(model, config=EngineConfig(policy=policy, kv_cache_mib=1, chunk_tokens=4), listener=recorder) as engine:
        engine.generate([[5, 6, 7, 8, 9, 10], [1, 2]], SamplingParams(max_tokens=5, ignore_eos=True))
    trace = trace_events(recorder.events)
    check(trace)
    assert sum(e["args"]["tokens"] for e in of_phase(trace, "X")) == (6 + 4) + (2 + 4)  # a last token is never read
    assert len(of_phase(trace, "i")) == 10
    assert len(of_phase(trace, "b")) == len(of_phase(trace, "f")) == 2


def test_written_file_and_recorder(tmp_path):
    recorder = TraceRecorder()
    for event in RUN:
        recorder(event)
    write(tmp_path / "run.json", recorder.events)
    written = json.loads((tmp_path / "run.json").read_text())
    assert written == {"traceEvents": trace_events(RUN), "displayTimeUnit": "ms"}


@pytest.mark.parametrize("where", ["absent/run.json", "."])
def test_a_place_that_cannot_be_written(tmp_path, where):
    with pytest.raises(SettingError, match="cannot be written"):
        write(tmp_path / where, RUN)
