"""What the scheduler reports. Metrics are computed from events alone. Times are `time.perf_counter()` seconds.

Named tuples, not dataclasses: one is made for every token, and they are made in a third of the time.
"""

from typing import NamedTuple

from deepinfer_lab.engine.stopping import FinishReason


class TokenEvent(NamedTuple):
    """One new token of a request. For `logprob` and `top` see `sampling.Choice`."""

    request_id: str
    token: int
    time: float
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class FinishEvent(NamedTuple):
    """The one terminal event of a request."""

    request_id: str
    reason: FinishReason
    time: float
    error: Exception | None = None


class StepEvent(NamedTuple):
    """One unit of work that a lane ran.

    Attributes:
        phase: "prefill" or "decode". lane: name of the lane. cycle: scheduler cycle that launched it.
        started, finished: device time where the lane has a device clock, else host time.
        request_ids: who was in it. tokens: new tokens computed.
    """

    phase: str
    lane: str
    cycle: int
    started: float
    finished: float
    request_ids: tuple[str, ...]
    tokens: int


Event = TokenEvent | FinishEvent | StepEvent
