"""How the scheduler learns that work is done: it asks, or Python is called back. On a CPU, with a stream that takes time alone.

The stream stands for a GPU's: work in order, each piece of a fixed length, and the true end of each is known without asking.
What calls back is a thread other than the scheduler's, as the driver's is, and it needs the interpreter's lock (the GIL) to run
Python. Like a host function on a CUDA stream, the next piece of work begins when the callback has returned.
"""

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_lab.engine.request import Request, Sequence
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import Stopper
from deepinfer_lab.engine.work import prepare_decode


@dataclass(frozen=True)
class Seen:
    """Pieces of work, in order.

    Attributes (seconds):
        late: between the end of each and the moment when Python knew. total: of all.
    """

    late: list[float]
    total: float


def in_turn(steps: int, step_s: float, cycle: Callable[[], object]) -> Seen:
    """No overlap: launch one piece, wait for its end, run a cycle, and so on."""
    late: list[float] = []
    begun = time.perf_counter()
    for _ in range(steps):
        end = time.perf_counter() + step_s
        while (now := time.perf_counter()) < end:
            pass
        late.append(now - end)
        cycle()
    return Seen(late, time.perf_counter() - begun)


def asked(steps: int, step_s: float, in_flight: int, cycle: Callable[[], object]) -> Seen:
    """The scheduler's thread asks after every cycle, as it does a CUDA event, and keeps `in_flight` pieces launched."""
    ends: deque[float] = deque()
    late: list[float] = []
    begun = last = time.perf_counter()
    launched = 0
    while len(late) < steps:
        while launched < steps and len(ends) < in_flight:
            last = max(last, time.perf_counter()) + step_s
            ends.append(last)
            launched += 1
        cycle()
        now = time.perf_counter()
        while ends and ends[0] <= now:
            late.append(now - ends.popleft())
    return Seen(late, time.perf_counter() - begun)


def called_back(steps: int, step_s: float, in_flight: int, cycle: Callable[[], object] | None) -> Seen:
    """A callback notes the end of each piece; the scheduler's thread goes on with cycles, or sleeps where there are none."""
    launches: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[float] = queue.SimpleQueue()

    def stream() -> None:
        free = 0.0  # since when the stream has had nothing to do
        while (launch := launches.get()) is not None:
            end = max(launch, free) + step_s
            while (left := end - time.perf_counter()) > 0:
                time.sleep(left)  # without the lock, as a GPU runs
            done.put(time.perf_counter() - end)
            free = time.perf_counter()

    thread = threading.Thread(target=stream, name="stream")
    late: list[float] = []
    begun = time.perf_counter()
    for _ in range(min(in_flight, steps)):
        launches.put(begun)
    thread.start()
    while len(late) < steps:
        if cycle is None:
            late.append(done.get())
        else:
            cycle()
            if done.empty():
                continue
            late.append(done.get())
        if len(late) + in_flight <= steps:
            launches.put(time.perf_counter())
    launches.put(None)
    thread.join()
    return Seen(late, time.perf_counter() - begun)


def spin(seconds: float) -> Callable[[], None]:
    """A cycle of nothing but Python."""

    def cycle() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return cycle


def prepare(requests: int, context: int) -> Callable[[], object]:
    """The largest part of a real cycle: the tensors of a decode step (`scheduler_bench`)."""
    sequences = []
    for number in range(requests):
        params = SamplingParams()
        sequence = Sequence(Request(str(number), (1,) * context, params), number, Stopper(params, (), None))
        sequence.block_table, sequence.launched = np.arange(-(-context // 16)), context - 1
        sequences.append(sequence)
    return lambda: prepare_decode(sequences, 0).step(16, torch.device("cpu"))


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """For how long a thread may keep the lock once another asks for it; Python's default is 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def completion_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A "completion" row for each way to learn of an end, what the scheduler does meanwhile, and the lock's interval."""
    steps, step_s, in_flight = params["steps"], params["step_ms"] / 1e3, params["in_flight"]
    python, real = spin(params["cycle_ms"] / 1e3), prepare(params["requests_in_step"], params["context"])
    for way, meanwhile, interval_ms, run in (
        ("waits", "nothing", 5.0, lambda: in_turn(steps, step_s, python)),
        ("asks", "Python", 5.0, lambda: asked(steps, step_s, in_flight, python)),
        ("asks", "prepares steps", 5.0, lambda: asked(steps, step_s, in_flight, real)),
        ("is called back", "sleeps", 5.0, lambda: called_back(steps, step_s, in_flight, None)),
        *(
            ("is called back", "Python", ms, lambda: called_back(steps, step_s, in_flight, python))
            for ms in params["switch_ms"]
        ),
        ("is called back", "prepares steps", 5.0, lambda: called_back(steps, step_s, in_flight, real)),
    ):
        with switch_interval(interval_ms / 1e3):
            seen = run()
        yield {
            "row": "completion",
            "way": way,
            "meanwhile": meanwhile,
            "switch_ms": interval_ms,
            "step_ms": params["step_ms"],
            "late_ms": [round(each * 1e3, 4) for each in seen.late],
            "total_s": seen.total,
        }
