"""What the scheduler reports. Metrics are computed from events alone. Times are `time.perf_counter()` seconds."""

from dataclasses import dataclass

from deepinfer_lab.engine.stopping import FinishReason


@dataclass(frozen=True)
class TokenEvent:
    """One new token of a request. For `logprob` and `top` see `sampling.Choice`."""

    request_id: str
    token: int
    time: float
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class FinishEvent:
    """The one terminal event of a request."""

    request_id: str
    reason: FinishReason
    time: float
    error: Exception | None = None


@dataclass(frozen=True)
class StepEvent:
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
