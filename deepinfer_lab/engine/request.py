"""A request, from the scheduler's point of view. Only the scheduler's thread touches a `Sequence`."""

from dataclasses import dataclass, field
from enum import Enum

from deepinfer_lab.engine.sampling import SamplingParams


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence token
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(eq=False)  # two requests are the same only if they are the same object
class Sequence:
    """A request in progress.

    Attributes:
        blocks: KV blocks, reserved in full when the request leaves the waiting queue.
        computed: tokens whose K and V are in the cache. sealed: blocks that are full.
        output: tokens generated so far; the last one's K and V are not in the cache yet.
    """

    request: Request
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    sealed: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.request.prompt) + len(self.output)

    @property
    def most_tokens(self) -> int:
        """The most K and V entries that the request can ever need; its last token is never fed back."""
        return len(self.request.prompt) + self.request.params.max_tokens - 1
