"""How many requests are in a system, what each waits for before its first token, and how many meet a limit."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_lab.engine.event import StepEvent
from deepinfer_lab.metrics.intervals import covered, length, union
from deepinfer_lab.metrics.latency import RequestTrace


@dataclass(frozen=True)
class Slo:
    """Limits that a request has to keep, both: seconds to its first token, and seconds a token after it."""

    ttft: float
    tpot: float

    def met(self, trace: RequestTrace) -> bool:
        """A request that failed meets nothing. One of a single token has no TPOT to miss."""
        if trace.error is not None or trace.ttft is None:
            return False
        return trace.ttft <= self.ttft and (trace.tpot is None or trace.tpot <= self.tpot)


@dataclass(frozen=True)
class Little:
    """N = lambda W, over a time that begins with nobody in the system and ends so.

    Attributes:
        requests: how many came and went. span: from the first arrival to the last end, seconds.
        mean_in_system: from the count over time. mean_time: that a request spent in the system, seconds.
    """

    requests: int
    span: float
    mean_in_system: float
    mean_time: float

    @property
    def rate(self) -> float:
        """lambda, requests per second."""
        return self.requests / self.span


def in_system(sent: Sequence[float], ended: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """How many requests are in the system, as a step function: times, increasing, and the count from each on."""
    times = np.concatenate([sent, ended])
    change = np.repeat([1, -1], [len(sent), len(ended)])
    order = np.argsort(times)
    times, count = times[order], change[order].cumsum()
    last = np.append(
        np.diff(times) > 0, True
    )  # of those at one time: a client whose request ends sends the next at once
    return times[last], count[last]


def little(sent: Sequence[float], ended: Sequence[float]) -> Little:
    """Both sides of Little's law, each from its own definition. At least one request, and time in it."""
    times, count = in_system(sent, ended)
    span = float(times[-1] - times[0])
    area = float((np.diff(times) * count[:-1]).sum())
    return Little(len(sent), span, area / span, float(np.mean(np.subtract(ended, sent))))


def closed_loop_times(durations: Sequence[float], clients: int) -> tuple[list[float], list[float]]:
    """When each request of a closed loop was sent and ended, from how long each took.

    A request is sent when the first client is free, and a client is free as soon as its last request has ended: requests must
    be given in the order in which they were sent. What a client does in between is taken as no time.
    """
    free = [0.0] * clients
    sent, ended = [], []
    for duration in durations:
        sent.append(heapq.heappop(free))
        ended.append(sent[-1] + duration)
        heapq.heappush(free, ended[-1])
    return sent, ended


@dataclass(frozen=True)
class TtftParts:
    """Where a request's time to first token went, in seconds. The parts add up to the TTFT.

    Attributes:
        queue: from its send until its first chunk began.
        prefill: its own chunks.
        beside: between its chunks, while steps of others ran.
        idle: between its chunks, while no step ran.
        first_token: from the end of its last chunk until the client had the token.
    """

    queue: float
    prefill: float
    beside: float
    idle: float
    first_token: float


def ttft_parts(trace: RequestTrace, steps: Sequence[StepEvent]) -> TtftParts | None:
    """Split a request's TTFT by the steps that ran meanwhile; None where it has no token or no step.

    A mixed step counts as a chunk of the request that it names first, and of nobody else. What a request that was preempted
    reads again, after its first token, does not count.
    """
    if not trace.token_times:
        return None
    until = trace.token_times[0]

    def reads_prompt(step: StepEvent) -> bool:
        whose = step.request_ids[:1] if step.phase == "mixed" else step.request_ids if step.phase == "prefill" else ()
        return trace.request_id in whose and step.started < until

    own = np.array([(step.started, step.finished) for step in steps if reads_prompt(step)]).reshape(-1, 2)
    if not len(own):
        return None
    first, last = own[:, 0].min(), own[:, 1].max()
    prefill = length(union(own))
    window = np.array([[first, last]])
    anything = union(np.array([(step.started, step.finished) for step in steps]))
    busy = float(covered(window, anything)[0])
    return TtftParts(
        queue=float(first - trace.sent),
        prefill=prefill,
        beside=busy - prefill,
        idle=float(last - first) - busy,
        first_token=float(until - last),
    )
