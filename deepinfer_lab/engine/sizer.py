"""How many prompt tokens one scheduler cycle may carry.

A chunk holds up everybody who decodes. A large one brings the newcomer to its first token sooner, a small one keeps the gaps
between everybody else's tokens short. While nobody decodes, no sizer has a reason for less than the configured chunk.
"""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from deepinfer_lab.engine.cost_model import GRANULE, CostModel
from deepinfer_lab.errors import SettingError

# Additive increase, multiplicative decrease (Chiu and Jain, 1989). Gaps between QUIET and 1 of the target change nothing.
QUIET, INCREASE, DECREASE, LEAST_SCALE = 0.8, 0.02, 0.7, 0.1
SPREAD_GAPS = 64  # as many decode steps on all multiprocessors, before fewer are tried again


class Outlook(NamedTuple):
    """What the planner knows when it sizes a chunk.

    Attributes:
        chunk_tokens: the configured most.
        decoding: requests that decode now. decode_context: tokens in their caches, of all together.
        start: tokens of the prompt that are computed already.
    """

    chunk_tokens: int
    decoding: int
    decode_context: int
    start: int


class Sizer(Protocol):
    """Asked once in each cycle that could prefill, and told how long things took. Those that learn serve one engine alone."""

    name: str
    spreads: bool = False  # decode steps are to have all multiprocessors beside a prompt, too, where lanes divide them

    def tokens(self, outlook: Outlook) -> int:
        """Size of the chunk, from 1 to `outlook.chunk_tokens`."""
        ...

    def observe_prefill(self, tokens: int, start: int, ms: float) -> None:
        """A chunk of `tokens` tokens behind `start` others took `ms`."""

    def observe_decode(self, rows: int, context: int, ms: float) -> None:
        """A step of `rows` requests with `context` tokens in their caches took `ms`."""

    def observe_gap(self, ms: float) -> None:
        """Two decode results came `ms` apart."""


@dataclass(frozen=True)
class Fixed(Sizer):
    """Always the configured chunk."""

    name: str = "fixed"

    def tokens(self, outlook: Outlook) -> int:
        return outlook.chunk_tokens


@dataclass(frozen=True)
class DecodeAware(Sizer):
    """At most `busy_tokens` while anyone decodes.

    Raises:
        SettingError: `busy_tokens` below 1.
    """

    busy_tokens: int = 128
    name: str = "decode-aware"

    def __post_init__(self) -> None:
        if self.busy_tokens < 1:
            raise SettingError(f"busy_tokens = {self.busy_tokens}: allowed is 1 or more")

    def tokens(self, outlook: Outlook) -> int:
        return min(outlook.chunk_tokens, self.busy_tokens) if outlook.decoding else outlook.chunk_tokens


@dataclass(frozen=True)
class MillisecondBudget(Sizer):
    """The largest chunk that, with the decode step beside it, is predicted to take no longer than `target_ms`.

    A granule of 64 tokens at least, so that a prompt always gets on, and a granule too before the model knows anything.

    Raises:
        SettingError: `target_ms` that is not above 0 and finite.
    """

    target_ms: float
    model: CostModel = field(default_factory=CostModel)
    name: str = "millisecond-budget"

    def __post_init__(self) -> None:
        _check_target(self.target_ms)

    def tokens(self, outlook: Outlook) -> int:
        if not outlook.decoding:
            return outlook.chunk_tokens
        step = self.model.decode_ms(outlook.decoding, outlook.decode_context)
        if step is not None:
            tokens = self.model.prefill_tokens_within(self.target_ms - step, outlook.start, outlook.chunk_tokens)
            if tokens is not None:
                return tokens
        # Granules alone would never show what a token costs.
        return min(outlook.chunk_tokens, 2 * GRANULE if self.model.wants_another_chunk_size else GRANULE)

    def observe_prefill(self, tokens: int, start: int, ms: float) -> None:
        self.model.observe_prefill(tokens, start, ms)

    def observe_decode(self, rows: int, context: int, ms: float) -> None:
        self.model.observe_decode(rows, context, ms)


class Adaptive(Sizer):
    """The configured chunk beside decode steps on their own multiprocessors; where gaps exceed the target, less of that.

    How much a chunk slows down the decode steps beside it is known only afterwards, and differs from card to card. After two
    gaps in a row that were too long, decode steps have all multiprocessors for a while, which costs prefill more. Where that
    is not enough, the chunk shrinks by a factor, and grows by steps while all gaps are short.

    Raises:
        SettingError: `target_ms` that is not above 0 and finite.
    """

    name = "adaptive"

    def __init__(self, target_ms: float) -> None:
        _check_target(target_ms)
        self._target_ms = target_ms
        self.scale = 1.0  # the part of the configured chunk that is read at once
        self._to_spread = 0  # gaps
        self._was_late = False

    @property
    def spreads(self) -> bool:
        return self._to_spread > 0

    def tokens(self, outlook: Outlook) -> int:
        if not outlook.decoding:
            return outlook.chunk_tokens
        granules = int(self.scale * outlook.chunk_tokens) // GRANULE
        return min(outlook.chunk_tokens, max(granules, 1) * GRANULE)

    def observe_gap(self, ms: float) -> None:
        late = ms > self._target_ms
        if late and self._was_late:  # one alone may be anything: a graph's first launch, a pause of the host
            if self.spreads:
                self.scale = max(LEAST_SCALE, self.scale * DECREASE)
            self._to_spread = SPREAD_GAPS
        else:
            self._to_spread = max(0, self._to_spread - 1)
        self._was_late = late
        if ms < QUIET * self._target_ms:
            self.scale = min(1.0, self.scale + INCREASE)


def _check_target(target_ms: float) -> None:
    if not 0 < target_ms < inf:
        raise SettingError(f"target_ms = {target_ms}: allowed are finite numbers above 0")
