"""The engine: a scheduler on a thread of its own, and what clients call."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from deepinfer_lab.engine import admission
from deepinfer_lab.engine.assemble import assemble, longest
from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.event import Event, TokenEvent
from deepinfer_lab.engine.event_log import EventLog
from deepinfer_lab.engine.handle import Completion, RequestHandle
from deepinfer_lab.engine.handles import Handles
from deepinfer_lab.engine.openmp import release_thread_pool
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stop_text import StopText
from deepinfer_lab.errors import AdmissionError, SettingError
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.tokenizer import Tokenizer

METRICS_S = 1.0  # between two snapshots


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
        self._scheduler = assemble(model, tokenizer, self.config)
        self.kv = self._scheduler.kv
        self._log = EventLog(self.config.event_log) if self.config.event_log else None
        self._handles = Handles([each for each in (self._log and self._log.add, listener) if each])
        self._refusals: Counter[str] = Counter()
        self._refusal_lock = threading.Lock()
        self._snapshot, self._snapshot_due = self._scheduler.status(), 0.0
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
        method: str = "rtn",
        group: int = 64,
        device: str | None = None,
        dispatch: str | Path | None = None,
        batch_invariant: bool = False,
        config: EngineConfig | None = None,
        listener: Callable[[Event], None] | None = None,
    ) -> "Engine":
        """Load a model and start an engine on it. For the arguments before `config` see `load_model`."""
        loaded = load_model(
            model,
            bits=bits,
            method=method,
            group=group,
            device=device,
            dispatch=dispatch,
            batch_invariant=batch_invariant,
        )
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
            request_id if request_id is not None else self._handles.new_id(),
            tuple(self._encode(prompt)) if isinstance(prompt, str) else _plain(prompt),
            params,
        )
        try:
            admission.check(
                request,
                vocab_size=self.model.config.vocab_size,
                max_context=longest(self.model, self.config),
                pool_tokens=self.kv.num_blocks * self.kv.block_size,
            )
            return self._handles.add(
                request, lambda admitted: self._commands.put(lambda: self._scheduler.add(admitted))
            )
        except AdmissionError as refusal:
            with self._refusal_lock:
                self._refusals[refusal.reason] += 1
            raise

    def cancel(self, request_id: str) -> None:
        """End a request early. It still yields exactly one terminal event; a finished or unknown one is left alone."""
        self._commands.put(lambda: self._handles.deliver(self._scheduler.cancel(request_id)))

    def cancel_all(self) -> None:
        """End every request that is live now."""
        for request_id in self._handles.live():
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

    def tune(self, *, chunk_tokens: int | None = None, max_in_flight: int | None = None) -> None:
        """Change limits of the running engine, from its next cycle on: what the configuration says is the most.

        Raises:
            SettingError: below 1, or more than configured.
        """
        new = {"chunk_tokens": chunk_tokens, "max_in_flight": max_in_flight}
        changes = {name: value for name, value in new.items() if value is not None}
        for name, value in changes.items():
            most = getattr(self.config, name)
            if not 1 <= value <= most:
                raise SettingError(f"{name} = {value}: allowed is 1 to {most}, as this engine was configured")
        self._commands.put(lambda: self._scheduler.tune(**changes))

    def status(self) -> dict[str, object]:
        """Queue sizes, blocks by state, step counters, refusals by reason: as they are now, which takes up to one step."""
        if threading.current_thread() is self._thread:  # a listener asks
            return self._with_totals(self._scheduler.status())
        reply: SimpleQueue[dict[str, object]] = SimpleQueue()
        self._commands.put(lambda: reply.put(self._scheduler.status()))
        while True:
            self._handles.check_open()
            with contextlib.suppress(Empty):
                return self._with_totals(reply.get(timeout=0.1))

    def metrics(self) -> dict[str, object]:
        """The same as they were up to a second ago, at once: for whoever asks often."""
        return self._with_totals(self._snapshot)

    def close(self) -> None:
        """Cancel whatever is live and stop the thread. Closing twice is harmless."""
        self._handles.close()
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:  # a listener may close, and cannot wait for itself
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _with_totals(self, status: dict[str, object]) -> dict[str, object]:
        return {**status, "refusals": dict(self._refusals), "kv_bytes": self.kv.nbytes}

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

    def _run(self) -> None:
        failure = None
        try:
            with torch.inference_mode():
                while not self._handles.closed:
                    self._drain()
                    if self._scheduler.busy():
                        self._handles.deliver(self._scheduler.cycle())
                    self._publish_metrics()
        except Exception as error:  # whatever it is, no client may wait forever
            failure = error
        finally:
            with contextlib.suppress(Exception):  # of a device that has failed
                self._scheduler.drain()  # its tensors and graphs must outlive what still runs
            self._handles.end_all(failure)
            if self._log is not None:
                self._log.close()

    def _drain(self) -> None:
        """Run what clients asked for. Waits only while there is nothing else to do."""
        if not self._scheduler.busy() and not self._handles.closed:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _publish_metrics(self) -> None:
        """Once a second, and before falling idle."""
        now = time.perf_counter()
        if now >= self._snapshot_due or not self._scheduler.busy():
            self._snapshot, self._snapshot_due = self._scheduler.status(), now + METRICS_S


def _plain(tokens: Sequence[object]) -> tuple[object, ...]:
    """Integers of any library as Python's own; what is no integer is left for admission to refuse."""
    if set(map(type, tokens)) <= {int}:  # at once: a loop over a long prompt would keep the engine's thread waiting
        return tuple(tokens)
    return tuple([int(token) if isinstance(token, Integral) else token for token in tokens])
