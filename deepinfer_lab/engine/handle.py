"""A client's end of a request: tokens come out of it as the engine produces them."""

from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

from deepinfer_lab.engine.event import FinishEvent, TokenEvent
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.stopping import FinishReason


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        request_id: its name. prompt_tokens: length of the prompt.
        tokens: generated token ids. text: the same, decoded, up to a stop string; empty where the model has no tokenizer.
        reason: why it ended. token_times: `time.perf_counter()` of each token.
        logprobs: for each token its log-probability and the likeliest tokens', as `sampling.Choice` has them.
    """

    request_id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    token_times: tuple[float, ...]
    logprobs: tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...]


class RequestHandle:
    """Iterate it once for `TokenEvent`s; after the last one `finish` holds the terminal event."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.finish: FinishEvent | None = None
        self._events: SimpleQueue[TokenEvent | FinishEvent] = SimpleQueue()

    def put(self, event: TokenEvent | FinishEvent) -> None:
        """Called by the engine's thread."""
        self._events.put(event)

    def __iter__(self) -> Iterator[TokenEvent]:
        """Yield tokens as they come, until the request has ended.

        Raises:
            The error that ended the request, if one did.
        """
        while self.finish is None:
            event = self._events.get()
            if isinstance(event, TokenEvent):
                yield event
                continue
            self.finish = event
        if self.finish.error is not None:
            raise self.finish.error
