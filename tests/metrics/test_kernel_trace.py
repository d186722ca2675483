"""Traces in Kineto's form, written by hand, and a real one of a CPU."""

import gzip
import json
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import record_function

from deepinfer_lab.errors import RecordError, SettingError
from deepinfer_lab.metrics import kernel_trace
from deepinfer_lab.metrics.kernel_trace import profiled, read

HOST, GPU = 4242, 0
LATE_US = 5_138_997_336_338.655  # times are told from a date that is months past


def range_(name, start, end, tid=1, cat="user_annotation"):
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": tid, "ts": start, "dur": end - start}


def launch(correlation, ts, tid=1, cat="cuda_runtime", name="cudaLaunchKernel"):
    args = {"External id": 9, "cbid": 211, "correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": tid, "ts": ts, "dur": 2.5, "args": args}


def kernel(correlation, start, end, stream=7, cat="kernel", name="gemv", gpu=GPU):
    args = {"device": gpu, "stream": stream, "correlation": correlation, "External id": 9}
    duration = (round(end * 1e3) - round(start * 1e3)) / 1e3  # written from whole nanoseconds
    return {"ph": "X", "cat": cat, "name": name, "pid": gpu, "tid": stream, "ts": start, "dur": duration, "args": args}


NOISE = [
    {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": 0.5, "args": {"name": "python"}},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 999.0},
    {
        "ph": "X",
        "cat": "Trace",
        "name": "PyTorch Profiler (0)",
        "pid": "Spans",
        "tid": "PyTorch Profiler",
        "ts": 0.0,
        "dur": 9,
    },
    {"ph": "s", "id": 1, "pid": HOST, "tid": 1, "ts": 12.0, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 1, "pid": GPU, "tid": 7, "ts": 30.0, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    range_("aten::mm", 0, 999, cat="cpu_op"),
    range_("decode", 0, 999, tid=1, cat="gpu_user_annotation"),  # tid is a stream here
]


def trace_of(tmp_path, *events, name="trace.json"):
    path = tmp_path / name
    text = json.dumps({"schemaVersion": 1, "traceEvents": [*NOISE, *events]})
    with (gzip.open if name.endswith(".gz") else open)(path, "wt") as file:
        file.write(text)
    return read(path)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_kernel_has_the_phase_in_which_it_was_launched_not_in_which_it_ran(tmp_path, name):
    trace = trace_of(
        tmp_path,
        range_("prefill", 10, 20),
        range_("decode", 20, 30),
        kernel(2, 26, 31.5, stream=13, name="attention"),
        kernel(1, 22, 26),  # runs while the host is in "decode" already
        launch(1, 12),
        launch(2, 21, cat="cuda_driver", name="cuLaunchKernel"),
        name=name,
    )
    assert trace.name.tolist() == ["gemv", "attention"]
    assert trace.kind.tolist() == ["kernel", "kernel"]
    assert trace.stream.tolist() == [7, 13]
    assert trace.phase.tolist() == ["prefill", "decode"]
    assert trace.times.tolist() == [[0, 4000], [4000, 9500]]  # ns since the first
    assert trace.kernels("decode").tolist() == [[4000, 9500]]
    assert trace.span_ms == 0.0095


def test_every_kernel_of_a_graph_has_the_phase_of_its_launch(tmp_path):
    kernels = [kernel(5, 100 + 10 * i, 108 + 10 * i) for i in range(4)]
    graph = launch(5, 51, name="cudaGraphLaunch")
    assert trace_of(tmp_path, range_("decode", 50, 60), graph, *kernels).phase.tolist() == ["decode"] * 4


def test_the_innermost_of_the_two_names_wins(tmp_path):
    ranges = [
        range_("prefill", 0, 100),
        range_("decode", 0, 2),  # starts with what it is in
        range_("decode", 20, 40),
        range_("prefill", 25, 30),
        range_("load weights", 50, 60),
        range_("decode", 90, 100),  # ends with what it is in
    ]
    launched = {
        1: "decode",
        5: "prefill",
        20: "decode",
        27: "prefill",
        30: "decode",
        39: "decode",
        40: "prefill",
        55: "prefill",
    }
    launched |= {95: "decode", 100: None}
    for order in (ranges, ranges[::-1]):
        events = [each for ts in launched for each in (launch(ts, ts), kernel(ts, 200 + ts, 200.5 + ts))]
        assert trace_of(tmp_path, *order, *events).phase.tolist() == list(launched.values())


def test_ranges_hold_for_their_own_thread_only(tmp_path):
    trace = trace_of(
        tmp_path,
        range_("prefill", 0, 100, tid=1),
        range_("decode", 10, 20, tid=2),
        *(event for tid in (1, 2, 3) for event in (launch(tid, 15, tid), kernel(tid, 30 + tid, 31 + tid))),
    )
    assert trace.phase.tolist() == ["prefill", "decode", None]
    assert len(trace.kernels(None)) == 1


def test_outside_of_every_range_and_without_a_launch(tmp_path):
    events = [launch(1, 5), kernel(1, 50, 51), launch(2, 31), kernel(2, 60, 61), kernel(3, 70, 71)]
    assert trace_of(tmp_path, range_("decode", 10, 20), *events).phase.tolist() == [None] * 3
    assert trace_of(tmp_path, *events).phase.tolist() == [None] * 3


def test_copies_and_fills_are_work_but_no_kernels(tmp_path):
    events = [
        range_("decode", 0, 50),
        *(launch(i, i) for i in (1, 2, 3)),
        kernel(1, 10, 11, cat="gpu_memset", name="Memset (Device)"),
        kernel(2, 12, 13, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)"),
        kernel(3, 14, 15),
    ]
    trace = trace_of(tmp_path, *events)
    assert trace.kind.tolist() == ["gpu_memset", "gpu_memcpy", "kernel"]
    assert trace.phase.tolist() == ["decode"] * 3
    assert trace.kernels("decode").tolist() == [[4000, 5000]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5_000)), min_size=1, max_size=40))
def test_kernels_that_follow_on_each_other_never_overlap(tmp_path_factory, gaps_and_lengths):
    """To the nanosecond: in float µs ts + dur would exceed the next ts now and then."""
    events, now = [], round(LATE_US * 1e3)
    for gap, ns in gaps_and_lengths:
        start, now = now + gap, now + gap + ns
        events.append(kernel(1, start / 1e3, now / 1e3))
    times = trace_of(tmp_path_factory.mktemp("trace"), *events).times
    assert (times[1:, 0] >= times[:-1, 1]).all()
    assert (times[:, 1] - times[:, 0]).tolist() == [ns for _, ns in gaps_and_lengths]


def test_no_kernels(tmp_path):
    trace = trace_of(tmp_path, range_("decode", 0, 1))
    assert trace.times.shape == trace.kernels("decode").shape == trace.kernels(None).shape == (0, 2)
    assert trace.span_ms == 0


def test_two_gpus_are_refused(tmp_path):
    with pytest.raises(RecordError, match=r"trace\.json.*of one GPU.*GPUs \[0, 1\]"):
        trace_of(tmp_path, kernel(1, 0, 1), kernel(2, 0, 1, gpu=1))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.json", None),
        ("empty.json", b""),
        ("cut.json", b'{"traceEvents": [{"ph": "X", '),
        ("other.json", b'{"events": []}'),
        ("list.json", b"[1, 2]"),
        ("numbers.json", b'{"traceEvents": [1, 2]}'),
        ("bytes.json", b"\xff\xfe\x00"),
        ("no-args.json", b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "ts": 1, "dur": 1}]}'),
        ("plain.json.gz", b'{"traceEvents": []}'),
        ("cut.json.gz", gzip.compress(b'{"traceEvents": []}')[:-9]),
        ("bad.json.gz", gzip.compress(b'{"traceEvents": []}')[:12] + b"\xff" * 20),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError, match=name):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["cpu.json", "cpu.json.gz"])
def test_a_real_trace_holds_the_ranges_of_all_threads(tmp_path, name, monkeypatch):
    """The engine's thread is older than the profile, and not the one that starts it."""
    go = threading.Event()

    def work():
        go.wait(20)
        with record_function("prefill"), record_function("decode"):
            torch.ones(8) @ torch.ones(8)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    path = tmp_path / name
    with profiled(path):
        go.set()
        for thread in threads:
            thread.join()
        work()
    if torch.cuda.is_available():
        pytest.skip("the rest expects that nothing ran on a GPU")
    assert len(read(path).times) == 0

    with (gzip.open if name.endswith(".gz") else open)(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    decodes = [event for event in events if (event.get("cat"), event["name"]) == ("user_annotation", "decode")]
    assert len({event["tid"] for event in decodes}) == 3

    # The same file with a kernel in each range: ids, clocks and threads are the profiler's own.
    for correlation, event in enumerate(decodes):
        events += [launch(correlation, event["ts"] + event["dur"] / 2, event["tid"]), kernel(correlation, 0, 1)]
    again = tmp_path / "again.json"
    again.write_text(json.dumps({"traceEvents": events}))
    assert read(again).phase.tolist() == ["decode"] * 3


def test_a_body_that_raises_leaves_no_profiler_running(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), profiled(path):
        raise ZeroDivisionError
    with pytest.raises(RecordError):
        read(path)
    with profiled(path):
        pass
    assert len(read(path).times) == 0


@pytest.mark.parametrize("where", ["absent/trace.json", "."])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, where):
    with pytest.raises(SettingError, match="cannot be written"), profiled(tmp_path / where):
        pytest.fail("the body ran")


def test_a_torch_that_profiles_one_thread_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_trace.torch._C._profiler, "_ExperimentalConfig", lambda: None)
    with pytest.raises(SettingError, match=r"profiles one thread only"), profiled(tmp_path / "trace.json"):
        pytest.fail("the body ran")
