"""Refusing what can never be served, before it costs anybody anything."""

from numbers import Integral

from deepinfer_lab.engine.request import Request
from deepinfer_lab.errors import AdmissionError, ContextOverflow, EmptyPrompt, InvalidToken, PoolOverflow


def check(request: Request, *, vocab_size: int, max_context: int, pool_tokens: int) -> None:
    """Admit a request, or say why not.

    Args:
        vocab_size: token ids must lie below it.
        max_context: tokens of prompt and output that the model was trained for.
        pool_tokens: tokens that the whole KV pool holds.

    Raises:
        EmptyPrompt, InvalidToken, ContextOverflow, PoolOverflow
    """
    prompt, new = len(request.prompt), request.params.max_tokens

    def too_long(kind: type[AdmissionError], limit: int, what: str) -> AdmissionError:
        return kind(
            f"request {request.id}: {prompt} prompt tokens + max_tokens {new} = {prompt + new} exceed {what} of {limit}"
        )

    if prompt == 0:
        raise EmptyPrompt(f"request {request.id}: the prompt holds no tokens; at least 1 is needed")
    stray = []
    if not set(map(type, request.prompt)) <= {int} or min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        stray = [token for token in request.prompt if not isinstance(token, Integral) or not 0 <= token < vocab_size]
    if stray:
        raise InvalidToken(
            f"request {request.id}: token id {stray[0]!r}; allowed are the integers 0 to {vocab_size - 1}"
        )
    if prompt + new > max_context:
        raise too_long(ContextOverflow, max_context, "the model's context")
    if prompt + new - 1 > pool_tokens:
        raise too_long(PoolOverflow, pool_tokens + 1, "what the KV pool can hold, room")
