"""The engine: a scheduler on a thread of its own, and what clients call."""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from deepinfer_lab.engine import admission
from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.event import Event, FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.event_log import EventLog
from deepinfer_lab.engine.handle import Completion, RequestHandle
from deepinfer_lab.engine.openmp import release_thread_pool
from deepinfer_lab.engine.policy import policy_named
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.scheduler import Limits, Scheduler
from deepinfer_lab.engine.stop_text import StopText
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import AdmissionError, DuplicateRequest, EngineClosed, SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.tokenizer import Tokenizer

MIB = 1 << 20


class Engine:
    """Serves many requests at a time from one model.

    Use it as a context manager, or call `close`. All methods may be called from any thread.

    Args:
        model: the decoder.
        tokenizer: for text prompts and text output; None where all prompts are token ids.
        config: settings.
        listener: called with every event, on the engine's thread; it must be quick and must not raise.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        listener: Callable[[Event], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.model, self.tokenizer = model, tokenizer
        mib = self.config.kv_cache_mib or (4096 if model.device.type == "cuda" else 512)
        shape = dataclasses.replace(model.kv_shape, quantised=self.config.kv_dtype == "int8")
        self.kv = KVPool.within(mib * MIB, shape, self.config.block_size, model.device)
        self._scheduler = Scheduler(
            model,
            self.kv,
            policy_named(self.config.policy),
            tokenizer.eos_ids if tokenizer else frozenset(),
            Limits(self.config.chunk_tokens, self.config.max_batch, self.config.max_in_flight),
            prefix_cache=self.config.prefix_cache,
            stream=tokenizer.stream if tokenizer else None,
        )
        self._listener = listener
        self._log = EventLog(self.config.event_log) if self.config.event_log else None
        self._refusals: dict[str, int] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()  # guards the three fields below
        self._handles: dict[str, RequestHandle] = {}
        self._closing = False
        self._failure: Exception | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        release_thread_pool()  # from here on, this engine's thread does the computing
        self._thread.start()

    @classmethod
    def load(
        cls,
        model: str = "smollm2-135m",
        *,
        bits: str = "w4",
        group: int = 64,
        device: str | None = None,
        dispatch: str | Path | None = None,
        config: EngineConfig | None = None,
        listener: Callable[[Event], None] | None = None,
    ) -> "Engine":
        """Load a model and start an engine on it. For the arguments before `config` see `load_model`."""
        loaded = load_model(model, bits=bits, group=group, device=device, dispatch=dispatch)
        return cls(loaded.decoder, loaded.tokenizer, config, listener)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> RequestHandle:
        """Queue a request and return at once.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop; greedy and 128 tokens by default.
            request_id: a name that no live request has; made up where None.

        Raises:
            AdmissionError: the request can never be served; one of its subclasses says why.
            EngineClosed: the engine was closed, or its thread has died.
        """
        params = params or SamplingParams()
        if params.stop:
            self._require_tokenizer()
        request = Request(
            request_id if request_id is not None else self._new_id(),
            tuple(self._encode(prompt) if isinstance(prompt, str) else prompt),
            params,
        )
        try:
            admission.check(
                request,
                vocab_size=self.model.config.vocab_size,
                max_context=self.model.config.max_context,
                pool_tokens=self.kv.num_blocks * self.kv.block_size,
            )
            return self._enqueue(request)
        except AdmissionError as refusal:
            with self._lock:
                self._refusals[refusal.reason] = self._refusals.get(refusal.reason, 0) + 1
            raise

    def cancel(self, request_id: str) -> None:
        """End a request early. It still yields exactly one terminal event; a finished or unknown one is left alone."""
        self._commands.put(lambda: self._dispatch(self._scheduler.cancel(request_id)))

    def cancel_all(self) -> None:
        """End every request that is live now."""
        with self._lock:
            live = list(self._handles)
        for request_id in live:
            self.cancel(request_id)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Yield text as it is generated, in pieces that never split a character. Leaving early cancels the request."""
        text = self._text(params or SamplingParams())
        handle = self.submit(prompt, params)
        try:
            for event in handle:
                if piece := text.push(event.token):
                    yield piece
            if rest := text.flush():
                yield rest
        finally:
            if handle.finish is None:
                self.cancel(handle.request.id)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Serve prompts together and return their completions in the same order.

        A refusal of any prompt cancels the others. For arguments and errors see `submit`.
        """
        handles = []
        try:
            for prompt in prompts:
                handles.append(self.submit(prompt, params))
            return [self.collect(handle) for handle in handles]
        finally:
            for handle in handles:
                if handle.finish is None:
                    self.cancel(handle.request.id)

    def collect(self, handle: RequestHandle) -> Completion:
        """Wait for a request to end."""
        events = list(handle)
        assert handle.finish is not None
        return Completion(
            handle.request.id,
            len(handle.request.prompt),
            tuple(event.token for event in events),
            self._decode(handle.request.params, events) if self.tokenizer else "",
            handle.finish.reason,
            tuple(event.time for event in events),
            tuple((event.logprob, event.top) for event in events),
        )

    def render_chat(self, message: str) -> str:
        """The model's chat template around one message of the user's, ready for the model's answer."""
        return self._require_tokenizer().render_chat([{"role": "user", "content": message}])

    def status(self) -> dict[str, object]:
        """Queue sizes, blocks by state, step counters, refusals by reason."""
        reply: SimpleQueue[dict[str, object]] = SimpleQueue()
        self._commands.put(lambda: reply.put(self._scheduler.status()))
        while True:
            self._check_open()
            with contextlib.suppress(Empty):
                return {**reply.get(timeout=0.1), "refusals": dict(self._refusals), "kv_bytes": self.kv.nbytes}

    def close(self) -> None:
        """Cancel whatever is live and stop the thread. Closing twice is harmless."""
        with self._lock:
            self._closing = True
        self._commands.put(lambda: None)
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _new_id(self) -> str:
        """A name that nobody has given to a live request."""
        with self._lock:
            return next(name for i in self._ids if (name := f"request-{i}") not in self._handles)

    def _text(self, params: SamplingParams) -> StopText:
        return StopText(self._require_tokenizer().stream(), params.stop, params.min_tokens + 1)

    def _decode(self, params: SamplingParams, events: list[TokenEvent]) -> str:
        text = self._text(params)
        return "".join([*(text.push(event.token) for event in events), text.flush()])

    def _encode(self, text: str) -> list[int]:
        return self._require_tokenizer().encode(text)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise SettingError("this model has no tokenizer: give the prompt as token ids, and read token ids")
        return self.tokenizer

    def _check_open(self) -> None:
        if self._closing or self._failure is not None:
            raise EngineClosed("the engine is closed" if self._failure is None else f"the engine died: {self._failure}")

    def _enqueue(self, request: Request) -> RequestHandle:
        handle = RequestHandle(request)
        with self._lock:
            self._check_open()
            if request.id in self._handles:
                raise DuplicateRequest(f"request id '{request.id}' belongs to a live request; ids must be unique")
            self._handles[request.id] = handle
            self._commands.put(lambda: self._scheduler.add(request))
        return handle

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._drain()
                    if self._scheduler.live():
                        self._dispatch(self._scheduler.cycle())
        except Exception as error:  # whatever it is, no client may wait forever
            self._failure = error
        finally:
            with self._lock:
                self._closing = True
            self._end_all()
            if self._log is not None:
                self._log.close()

    def _drain(self) -> None:
        """Run what clients asked for. Waits only while there is nothing else to do."""
        if not self._scheduler.live() and not self._closing:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if self._log is not None:
                self._log.add(event)
            if self._listener is not None:
                self._listener(event)
            if isinstance(event, StepEvent):
                continue
            if isinstance(event, FinishEvent):
                with self._lock:
                    handle = self._handles.pop(event.request_id)
            else:
                handle = self._handles[event.request_id]
            handle.put(event)

    def _end_all(self) -> None:
        """Give every live request its terminal event."""
        reason = FinishReason.CANCELLED if self._failure is None else FinishReason.ERROR
        error = None if self._failure is None else EngineClosed(f"the engine died: {self._failure!r}")
        with self._lock:
            handles, self._handles = self._handles, {}
        for request_id, handle in handles.items():
            event = FinishEvent(request_id, reason, time.perf_counter(), error)
            handle.put(event)
            if self._log is not None:
                self._log.add(event)
            if self._listener is not None:
                with contextlib.suppress(Exception):  # it may be the listener that failed
                    self._listener(event)
