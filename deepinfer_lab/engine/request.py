"""A request, from the scheduler's point of view. Only the scheduler's thread touches a `Sequence`."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from deepinfer_lab.engine.sampling import Draw, SamplingParams
from deepinfer_lab.engine.stopping import Stopper


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(eq=False, slots=True)  # two requests are the same only if they are the same object
class Sequence:
    """A request in progress.

    Attributes:
        arrival: its place in the order of arrival, which is also its priority.
        stopper: knows when it ends.
        tokens: prompt and output so far. greedy_only: as its settings have it.
        blocks: KV blocks that it holds, in the order of its tokens; `block_table` is the same as an array.
        computed: tokens whose K and V are in the cache. sealed: blocks that are full.
        launched: tokens whose K and V will be in the cache once all that was launched has run: one more than it has tokens
            where a step runs ahead.
        in_flight: pieces of work on it that were launched and are not committed yet.
    """

    request: Request
    arrival: int
    stopper: Stopper
    tokens: list[int] = field(init=False)
    greedy_only: bool = field(init=False)
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    block_table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    computed: int = 0
    sealed: int = 0
    launched: int = 0
    in_flight: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.greedy_only = self.request.params.greedy_only

    @property
    def output(self) -> list[int]:
        """Tokens generated so far; the last one's K and V are not in the cache yet."""
        return self.tokens[len(self.request.prompt) :]

    def draw(self) -> Draw:
        """What the choice of the next token depends on, besides the logits."""
        return Draw(self.request.params, len(self.tokens), self.tokens, self.stopper.banned)
