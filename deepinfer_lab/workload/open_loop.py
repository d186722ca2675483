"""A load client with a fixed schedule: it sends each request when it is due, whatever is still running."""

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise

from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.handle import RequestHandle
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import SettingError
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.progress import bar
from deepinfer_lab.workload.closed_loop import receive, start


@dataclass(frozen=True)
class OpenLoopResult:
    """What clients saw, and whether the load was the one asked for. Times are seconds since the run's origin.

    Attributes:
        traces: in the order of the requests. `sent` is when a request was *due*: a client that was late made its user
            wait, and to count from its own send would hide just the waits that matter (coordinated omission).
        submitted: when the client really began to send each request; never before it was due.
    """

    traces: tuple[RequestTrace, ...]
    submitted: tuple[float, ...]

    @property
    def offered_rate(self) -> float | None:
        """Requests a second that were asked for: gaps over the time from the first due to the last."""
        return _rate([trace.sent for trace in self.traces])

    @property
    def achieved_rate(self) -> float | None:
        """Requests a second that were sent, refused ones included. Below `offered_rate` the load was not the one asked for."""
        return _rate(self.submitted)

    @property
    def max_lateness(self) -> float:
        """The longest that a request was sent after it was due, in seconds."""
        return max((at - trace.sent for at, trace in zip(self.submitted, self.traces, strict=True)), default=0.0)


def open_loop(
    engine: Engine,
    requests: Sequence[tuple[str | Sequence[int], int]],
    due: Sequence[float],
    *,
    max_concurrency: int | None = None,
    name: str = "request",
    origin: float | None = None,
) -> OpenLoopResult:
    """Send all requests, each when it is due, and wait for all of them.

    The calling thread sends; every live request has a thread that reads its tokens. Text is tokenised by the sender, so
    that long texts make later requests late. Token ids are cheaper.

    Args:
        requests: prompt (text or token ids) and number of output tokens, which are generated whatever the model says.
        due: when to send each, in seconds since the origin; nondecreasing.
        max_concurrency: the most requests that are live at a time; a request that finds no room waits until one ends. It
            makes a lower rate than the one asked for. None sets no limit.
        name: what request ids begin with.
        origin: `time.perf_counter()` that `due` and the traces' times count from; now, by default.

    Raises:
        SettingError: due times that decrease, are not finite or not as many as requests; a limit below 1.
        InvalidSampling: a number of output tokens below 1.
        EngineClosed: the engine died.
        RequestFailed: the engine had to give a request up. As after any other error, all requests are cancelled.
    """
    _check(len(requests), due, max_concurrency)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for _, tokens in requests]
    limit = max_concurrency or max(1, len(requests))
    room, failed = threading.Semaphore(limit), threading.Event()
    traces: dict[int, RequestTrace] = {}
    submitted: list[float] = []
    reading: list[Future[None]] = []
    origin = time.perf_counter() if origin is None else origin

    def read(i: int, handle: RequestHandle) -> None:
        try:
            traces[i] = receive(handle, due[i], origin)
        except BaseException:
            failed.set()  # before there is room: a run that has failed sends nothing more
            raise
        finally:
            room.release()

    with ThreadPoolExecutor(limit, thread_name_prefix="client") as pool:
        try:
            for i, (prompt, _) in enumerate(bar(requests, desc="sending", unit="request")):
                room.acquire()
                _wait(origin + due[i], failed)
                if failed.is_set():
                    break
                submitted.append(time.perf_counter() - origin)
                started = start(engine, f"{name}-{i}", prompt, params[i], due[i])
                if isinstance(started, RequestTrace):
                    traces[i] = started
                    room.release()
                else:
                    reading.append(pool.submit(read, i, started))
            for future in bar(as_completed(reading), total=len(reading), desc="finishing", unit="request"):
                future.result()
        except BaseException:
            engine.cancel_all()
            raise
    return OpenLoopResult(tuple(traces[i] for i in range(len(requests))), tuple(submitted))


def _wait(until: float, failed: threading.Event) -> None:
    """Sleep until then, or until the run has failed."""
    while (left := until - time.perf_counter()) > 0 and not failed.wait(left):
        pass  # a wait may end a little early


def _rate(times: Sequence[float]) -> float | None:
    """N times have N - 1 gaps. None where there is no gap, or no time in them."""
    span = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / span if span > 0 else None


def _check(requests: int, due: Sequence[float], max_concurrency: int | None) -> None:
    if len(due) != requests:
        raise SettingError(f"{len(due)} due times: allowed are {requests}, one for each request")
    for i, at in enumerate(due):
        if not 0 <= at < math.inf:
            raise SettingError(f"due time {at} of request {i}: allowed is 0 or more, and finite")
    for i, (at, after) in enumerate(pairwise(due)):
        if after < at:
            raise SettingError(f"due time {after} of request {i + 1}: allowed is {at}, that of the one before, or more")
    if max_concurrency is not None and max_concurrency < 1:
        raise SettingError(f"max_concurrency {max_concurrency}: allowed is 1 or more, or None")
