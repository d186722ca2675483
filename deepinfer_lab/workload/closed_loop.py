"""A load client with fixed concurrency: each of C clients sends its next request when its last one has ended."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.handle import RequestHandle
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import AdmissionError, SettingError
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.progress import bar


def start(
    engine: Engine, request_id: str, prompt: str | Sequence[int], params: SamplingParams, sent: float
) -> RequestHandle | RequestTrace:
    """Tokenise and submit one request. A refusal becomes a trace with an error.

    Args:
        sent: for that trace: when the request was sent.
    """
    if isinstance(prompt, str) and engine.tokenizer is not None:
        prompt = engine.tokenizer.encode(prompt)
    try:
        return engine.submit(prompt, params, request_id)
    except AdmissionError as refusal:
        return RequestTrace(request_id, len(prompt), sent, (), f"{type(refusal).__name__}: {refusal}")


def receive(
    handle: RequestHandle, sent: float, origin: float, on_token: Callable[[], object] = lambda: None
) -> RequestTrace:
    """Read a request to its end and note when each token arrives.

    Args:
        sent: when the request was sent, in seconds since the origin.
        origin: `time.perf_counter()` that the trace's times count from.
        on_token: called after each token.
    """
    times = []
    for _ in handle:
        times.append(time.perf_counter() - origin)
        on_token()
    cancelled = handle.finish.reason is FinishReason.CANCELLED
    return RequestTrace(
        handle.request.id, len(handle.request.prompt), sent, tuple(times), "cancelled" if cancelled else None
    )


def send(
    engine: Engine, request_id: str, prompt: str | Sequence[int], params: SamplingParams, origin: float
) -> RequestTrace:
    """Send one request and note when each token arrives. A refusal becomes a trace with an error.

    Args:
        origin: `time.perf_counter()` that the trace's times count from.
    """
    sent = time.perf_counter() - origin
    started = start(engine, request_id, prompt, params, sent)
    return started if isinstance(started, RequestTrace) else receive(started, sent, origin)


def closed_loop(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    concurrency: int,
    name: str = "request",
    origin: float | None = None,
) -> list[RequestTrace]:
    """Send all prompts, `concurrency` at a time, and return their traces in the same order.

    Args:
        prompts: texts or token ids.
        params: the same for all.
        concurrency: clients, at least 1.
        name: what request ids begin with.
        origin: `time.perf_counter()` that the traces' times count from; now, by default.

    Raises:
        SettingError: concurrency below 1.
        EngineClosed: the engine died.
    """
    if concurrency < 1:
        raise SettingError(f"concurrency {concurrency}: allowed is 1 or more")
    origin = time.perf_counter() if origin is None else origin
    with ThreadPoolExecutor(concurrency, thread_name_prefix="client") as pool:
        futures = [pool.submit(send, engine, f"{name}-{i}", prompt, params, origin) for i, prompt in enumerate(prompts)]
        try:
            for future in bar(as_completed(futures), total=len(futures), desc=f"{concurrency} clients", unit="request"):
                future.result()
        except BaseException:
            engine.cancel_all()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]
