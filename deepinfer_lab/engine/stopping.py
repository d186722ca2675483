"""When a request has said enough."""

from collections.abc import Collection
from enum import Enum

from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stop_text import StopText
from deepinfer_lab.model.token_stream import TokenStream


class FinishReason(Enum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"
    ERROR = "error"


class Stopper:
    """Follows the new tokens of one request and says when they end it. Survives a preemption with the request.

    Args:
        params: its settings. eos_ids: the model's end-of-sequence tokens.
        stream: turns its tokens into text; needed where there are stop strings, else None.
    """

    __slots__ = ("_count", "_ends", "_max_tokens", "_min_tokens", "_text")  # asked for every token

    def __init__(self, params: SamplingParams, eos_ids: Collection[int], stream: TokenStream | None) -> None:
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        assert stream is not None or not params.stop
        self._text = StopText(stream, params.stop, params.min_tokens + 1) if stream and params.stop else None
        self._count = 0

    @property
    def banned(self) -> Collection[int]:
        """Tokens that must not come next: those that would end the request before `min_tokens`."""
        return self._ends if self._count < self._min_tokens else ()

    def push(self, token: int) -> FinishReason | None:
        """Take the next token. Why the request ends with it, or None if it goes on."""
        self._count = count = self._count + 1
        text = self._text
        if text is not None:
            text.push(token)
        if token in self._ends or (text is not None and text.found is not None):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self._max_tokens else None
