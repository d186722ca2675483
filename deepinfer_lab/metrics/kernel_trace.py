"""When each GPU kernel ran and for which phase, from CUPTI through torch.profiler.

A kernel's phase is that of the `torch.profiler.record_function("prefill")` or `("decode")` in which the host launched it.
The export holds three kinds of complete events ("ph": "X"; times in µs), and nothing else is read:

    cat                                name                 found by
    kernel, gpu_memcpy, gpu_memset     what ran             args.correlation, the same as of the call that launched it
    cuda_runtime, cuda_driver          the launching call   args.correlation; ts and tid are the host's
    user_annotation                    the range            ts, dur and tid are the host's

All kernels of a CUDA graph carry the correlation of the cudaGraphLaunch that replayed them.
"""

import gzip
import json
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from deepinfer_lab.errors import RecordError, SettingError

PHASES = ("prefill", "decode")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KernelTrace:
    """What one GPU ran, one row for each kernel, copy or fill, by start.

    Attributes:
        name: object [N]. kind: "kernel", "gpu_memcpy" or "gpu_memset", object [N].
        stream: int64 [N]. phase: "prefill", "decode", or None for what was launched outside of both, object [N].
        times: start and end, int64 [N, 2], nanoseconds since the first start. In float µs since some date, as they are in
            the file, a kernel's end may exceed the start of the next by rounding alone.
    """

    name: np.ndarray
    kind: np.ndarray
    stream: np.ndarray
    phase: np.ndarray
    times: np.ndarray

    def kernels(self, phase: str | None) -> np.ndarray:
        """Start and end of each kernel of a phase, [M, 2]. Copies do not count: they may run on an engine of their own."""
        return self.times[(self.kind == "kernel") & (self.phase == phase)]

    @property
    def span_ms(self) -> float:
        """From the first start to the last end; 0 where nothing ran."""
        return float(self.times[:, 1].max() - self.times[:, 0].min()) / 1e6 if len(self.times) else 0.0


@contextmanager
def profiled(path: Path) -> Iterator[None]:
    """Profile what runs inside, on all threads, and write the trace. Without a GPU it holds no kernels.

    The host is slower under the profiler, which notes every operator: the GPU may idle more than it would otherwise.

    Args:
        path: of the JSON; gzipped where it ends in ".gz". It stays empty where the body raises.

    Raises:
        SettingError: the file cannot be written, or this torch profiles one thread only.
    """
    try:
        path.open("wb").close()  # now: when the profiler cannot write, it does not raise
    except OSError as error:
        raise SettingError(f"trace {str(path)!r}: cannot be written ({error.strerror})") from error
    try:  # an engine launches from a thread of its own, which the profiler would not see
        all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError as error:
        raise SettingError(f"torch {torch.__version__} profiles one thread only: a trace needs 2.7 or newer") from error
    activities = [ProfilerActivity.CPU]  # for the ranges
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, experimental_config=all_threads) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def read(path: Path) -> KernelTrace:
    """Read what `profiled` wrote, or any Chrome trace that torch.profiler exported.

    Raises:
        RecordError: no such file, not such a trace, or kernels of several GPUs.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        return _trace_of([event for event in events if event["ph"] == "X"])
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise RecordError(
            f"trace {str(path)!r}: not a trace of one GPU that torch.profiler exported ({error!r})"
        ) from error


def _trace_of(events: list[dict]) -> KernelTrace:
    work = sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"])
    devices = {event["pid"] for event in work}  # what runs on a GPU has its number for a process
    if len(devices) > 1:
        raise ValueError(f"kernels of GPUs {sorted(devices)}")
    ranges = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in PHASES:
            ranges[event["tid"]].append((*_start_end(event), event["name"]))
    phases = {thread: _Phases(each) for thread, each in ranges.items()}
    # A thread that has the POSIX id of an earlier, dead one launches under the dead one's number (seen in torch 2.11's traces
    # of several engines in one process). Where one thread alone has ranges, launches within them can only be its own.
    (only,) = phases.values() if len(phases) == 1 else (None,)
    launches = [event for event in events if event.get("cat") in LAUNCHES]
    phase_of = {
        event["args"]["correlation"]: on_thread.at(_start_end(event)[0])
        for event in launches
        if (on_thread := only or phases.get(event["tid"])) is not None
    }
    times = np.array([_start_end(event) for event in work], dtype=np.int64).reshape(-1, 2)
    return KernelTrace(
        name=np.array([event["name"] for event in work], dtype=object),
        kind=np.array([event["cat"] for event in work], dtype=object),
        stream=np.array([event["args"]["stream"] for event in work], dtype=np.int64),
        phase=np.array([phase_of.get(event["args"]["correlation"]) for event in work], dtype=object),
        times=times - times[:1, :1],
    )


class _Phases:
    """The innermost range of a thread at any time.

    Args:
        ranges: (start, end, phase) of ranges that nest, in any order.
    """

    def __init__(self, ranges: list[tuple[int, int, str]]) -> None:
        self._times, self._phases = [], []  # from each time on, the phase is this
        inside: list[tuple[int, str | None]] = []  # (end, phase), the innermost last
        for start, end, phase in sorted(ranges, key=lambda each: (each[0], -each[1])):
            self._leave(inside, start)
            inside.append((end, phase))
            self._note(start, phase)
        self._leave(inside, max((end for _, end, _ in ranges), default=0))

    def at(self, time: int) -> str | None:
        index = bisect_right(self._times, time) - 1
        return self._phases[index] if index >= 0 else None

    def _leave(self, inside: list[tuple[int, str | None]], time: int) -> None:
        """Leave the ranges that have ended by then."""
        while inside and inside[-1][0] <= time:
            end, _ = inside.pop()
            self._note(end, inside[-1][1] if inside else None)

    def _note(self, time: int, phase: str | None) -> None:
        self._times.append(time)
        self._phases.append(phase)


def _start_end(event: dict) -> tuple[int, int]:
    """In whole nanoseconds, of which the export made µs with three decimals."""
    start = round(event["ts"] * 1e3)
    return start, start + round(event["dur"] * 1e3)
