"""A long document comes in while others decode: what reading its prompt costs those who wait for their next token."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from queue import SimpleQueue

from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.handle import RequestHandle
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import RequestFailed, SettingError
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.progress import bar
from deepinfer_lab.workload.closed_loop import receive


@dataclass(frozen=True)
class Insertion:
    """What clients saw of one insertion. All times are seconds since one origin.

    The window of the insertion lasts from the document's send to its first token. A reader's gap is disturbed where any
    part of it lies in the window. Where a gap *ends* would not tell: if the document's prompt is read in one go, the gap
    that holds all of it ends together with the window, and so on either side.

    Attributes:
        readers: requests that decoded before, during and after the window. document: the one that came in.
    """

    readers: tuple[RequestTrace, ...]
    document: RequestTrace

    @property
    def window(self) -> tuple[float, float]:
        """When the document was sent, and when its first token arrived."""
        return self.document.sent, self.document.token_times[0]

    @property
    def ttft(self) -> float:
        """The document's time to first token, in seconds."""
        sent, first = self.window
        return first - sent

    @property
    def disturbed_itl(self) -> list[float]:
        """Gaps between tokens of readers that overlap the window, in seconds."""
        sent, first = self.window
        return [end - begin for begin, end in self._gaps() if begin < first and sent < end]

    @property
    def steady_itl(self) -> list[float]:
        """Gaps outside the window, from when all readers decode: before, they wait for each other's prompts."""
        sent, first = self.window
        decoding = max(trace.token_times[0] for trace in self.readers)
        return [end - begin for begin, end in self._gaps() if begin >= decoding and (end <= sent or begin >= first)]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second in the window: the document's prompt, its first token, and what readers received.

        The prompt counts whole, so nothing of it may be in the prefix cache.
        """
        sent, first = self.window
        received = sum(sent <= at <= first for trace in self.readers for at in trace.token_times)
        return (self.document.prompt_tokens + 1 + received) / self.ttft

    def _gaps(self) -> Iterator[tuple[float, float]]:
        for trace in self.readers:
            yield from pairwise(trace.token_times)


def insert_document(
    engine: Engine,
    readers: Sequence[str | Sequence[int]],
    document: str | Sequence[int],
    *,
    reader_tokens: int,
    document_tokens: int = 4,
    settle_tokens: int = 16,
    name: str = "insertion",
    origin: float | None = None,
) -> Insertion:
    """Let readers decode, send a document, and let them decode on. Then the readers are cancelled.

    Args:
        readers: their prompts, text or token ids; short ones.
        document: its prompt; a long one.
        reader_tokens: output tokens that a reader asks for: more than it can receive until all is over.
        document_tokens: output tokens of the document.
        settle_tokens: tokens that every reader receives before the document is sent, and again after its first token.
        name: what request ids begin with.
        origin: `time.perf_counter()` that times count from; now, by default.

    Raises:
        SettingError: no reader, or more than the engine takes beside the document; a number of tokens below its range;
            readers that ran out of tokens too early.
        AdmissionError: the engine refuses a reader or the document.
        RequestFailed: the engine gave a request up, or somebody else cancelled it.
        EngineClosed: the engine died.
    """
    most = engine.config.max_batch - 1
    if not 1 <= len(readers) <= most:
        raise SettingError(f"{len(readers)} readers: allowed are 1 to {most}, the engine's max_batch less the document")
    if settle_tokens < 1:
        raise SettingError(f"settle_tokens {settle_tokens}: allowed is 1 or more")
    least = 2 * settle_tokens + 1
    if reader_tokens < least:
        raise SettingError(f"reader_tokens {reader_tokens}: allowed is {least} (2 settle_tokens + 1) or more")
    decode = SamplingParams(max_tokens=reader_tokens, ignore_eos=True)
    answer = SamplingParams(max_tokens=document_tokens, ignore_eos=True)
    origin = time.perf_counter() if origin is None else origin
    progress = _Progress()
    with ThreadPoolExecutor(len(readers), thread_name_prefix="reader") as pool:
        try:
            ids, reading = [f"{name}-reader-{i}" for i in range(len(readers))], []
            for request_id, prompt in zip(ids, readers, strict=True):
                sent = time.perf_counter() - origin
                reader = _Reader(engine.submit(prompt, decode, request_id), settle_tokens, progress)
                reading.append(pool.submit(reader.read, sent, origin))
            _await(progress.settled, len(readers), "readers settle")
            sent = time.perf_counter() - origin
            handle = engine.submit(document, answer, f"{name}-document")
            trace = receive(handle, sent, origin, progress.inserted.set)
            if trace.error is not None:
                raise _cancelled(handle, len(trace.token_times))
            _await(progress.recovered, len(readers), "readers recover")
            for request_id in ids:
                engine.cancel(request_id)
            return Insertion(tuple(future.result() for future in reading), trace)
        except BaseException:
            engine.cancel_all()
            raise


class _Progress:
    """How far a run is. Each reader puts None into both queues, or what ended it; `inserted` is for them to see."""

    def __init__(self) -> None:
        self.settled: SimpleQueue[BaseException | None] = SimpleQueue()
        self.recovered: SimpleQueue[BaseException | None] = SimpleQueue()
        self.inserted = threading.Event()  # the document's first token has arrived


class _Reader:
    """Reads a request and reports when it has received enough tokens: before the insertion, and after it."""

    def __init__(self, handle: RequestHandle, settle_tokens: int, progress: _Progress) -> None:
        self._handle, self._progress = handle, progress
        self._before = settle_tokens  # still to come
        self._after = settle_tokens + 1  # the first of these may have come a moment before the document's

    def read(self, sent: float, origin: float) -> RequestTrace:
        try:
            trace = receive(self._handle, sent, origin, self._count)
            if self._after > 0:
                raise self._ended_early(len(trace.token_times))
            return replace(trace, error=None)  # cancelled on purpose
        except BaseException as failure:
            self._progress.settled.put(failure)
            self._progress.recovered.put(failure)
            raise

    def _count(self) -> None:
        self._before -= 1
        if self._before == 0:
            self._progress.settled.put(None)
        if self._progress.inserted.is_set():
            self._after -= 1
            if self._after == 0:
                self._progress.recovered.put(None)

    def _ended_early(self, tokens: int) -> Exception:
        if self._handle.finish.reason is FinishReason.CANCELLED:
            return _cancelled(self._handle, tokens)
        return SettingError(
            f"reader_tokens {tokens}: {self._handle.request.id} had received them all before it could settle after the "
            "document; give it more"
        )


def _await(reports: SimpleQueue[BaseException | None], count: int, desc: str) -> None:
    for _ in bar(range(count), desc=desc, unit="reader"):
        failure = reports.get()
        if failure is not None:
            raise failure


def _cancelled(handle: RequestHandle, tokens: int) -> RequestFailed:
    return RequestFailed(f"request {handle.request.id} was cancelled from elsewhere after {tokens} tokens")
