"""Serving a model under load and turning what happened into tidy rows. Shared by notebooks and `bench serve`."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import Event, StepEvent
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import RequestFailed, SettingError
from deepinfer_lab.lab.load_spec import SEED, InsertionLoad, Load, OpenLoad
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.model.load import LoadedModel
from deepinfer_lab.workload.closed_loop import closed_loop
from deepinfer_lab.workload.insertion import Insertion, insert_document
from deepinfer_lab.workload.open_loop import OpenLoopResult, open_loop
from deepinfer_lab.workload.text import prompts as text_prompts
from deepinfer_lab.workload.text import random_token_ids

WARM_UP = SamplingParams(max_tokens=4, ignore_eos=True)
WARM_UP_REQUESTS = 8  # of an open loop, which has no number of clients
SETTLE_TOKENS = 16  # that readers receive before a document comes in, and again after it


@dataclass(frozen=True)
class LoadResult:
    """What clients saw and what lanes ran, on one clock that starts with the load."""

    load: Load
    traces: tuple[RequestTrace, ...]
    steps: tuple[StepEvent, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Tidy rows of two kinds, told apart by the column `row`: one per request, one per step."""
        for trace in self.traces:
            yield {
                "row": "request",
                "concurrency": self.load.concurrency,
                "request": trace.request_id,
                "prompt_tokens": trace.prompt_tokens,
                "sent_s": trace.sent,
                "token_times_s": list(trace.token_times),
                "error": trace.error,
            }
        for step in self.steps:
            yield {
                "row": "step",
                "concurrency": self.load.concurrency,
                "phase": step.phase,
                "lane": step.lane,
                "started_s": step.started,
                "finished_s": step.finished,
                "tokens": step.tokens,
                "requests": list(step.request_ids),
            }


def trace_of(row: dict[str, Any]) -> RequestTrace:
    """The trace that a "request" row was made from."""
    return RequestTrace(
        row["request"], row["prompt_tokens"], row["sent_s"], tuple(row["token_times_s"]), row.get("error")
    )


class Server:
    """An engine that serves loads and remembers its steps. A context manager.

    Prompts are cut from the reference text; for a model without a tokenizer they are random token ids, the same in every run.
    Every request generates exactly as many tokens as the load says, whatever the model says.

    Its prefix cache is off: the warm-up sends the same prompts, and reading them is part of what is measured.

    Args:
        listener: as `Engine` has it. It hears of warm-ups too.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig, listener: Callable[[Event], None] | None = None
    ) -> None:
        self._model, self._listener = model, listener
        self._steps: list[StepEvent] = []
        self.engine = Engine(model.decoder, model.tokenizer, replace(config, prefix_cache=False), listener=self._note)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()

    def serve(self, load: Load) -> LoadResult:
        """Warm up, then run a closed loop.

        Raises:
            RequestFailed: not one request ended well.
        """
        prompts = self._prompts([load.prompt_tokens] * (load.concurrency * load.requests_per_client))
        self._warm_up(prompts[: load.concurrency])
        self._steps.clear()
        params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=True)
        origin = time.perf_counter()
        traces = closed_loop(self.engine, prompts, params, load.concurrency, f"c{load.concurrency}", origin)
        _require_success(traces)
        return LoadResult(load, tuple(traces), tuple(_shifted(step, origin) for step in self._steps))

    def serve_open(self, load: OpenLoad) -> OpenLoopResult:
        """Warm up with the first few requests, then run an open loop. For errors see `serve` and `open_loop`."""
        prompts = self._prompts([tokens for tokens, _ in load.sizes])
        self._warm_up(prompts[:WARM_UP_REQUESTS])
        requests = [(prompt, tokens) for prompt, (_, tokens) in zip(prompts, load.sizes, strict=True)]
        result = open_loop(self.engine, requests, load.due, max_concurrency=load.max_concurrency, name=load.name)
        _require_success(result.traces)
        return result

    def insert(self, load: InsertionLoad) -> Insertion:
        """Warm up, then insert a document among readers that decode. For other errors see `insert_document`.

        Raises:
            SettingError: prompts that leave readers no room to decode on.
        """
        kv = self.engine.kv
        most = min(self._model.decoder.config.max_context, kv.num_blocks * kv.block_size)
        allowed = most - 2 * SETTLE_TOKENS - 1
        if load.prompt_tokens > allowed:
            raise SettingError(
                f"prompt-tokens {load.prompt_tokens}: allowed are 1 to {allowed}, so that readers decode on within {most}"
            )
        *readers, document = self._prompts([load.prompt_tokens] * load.readers + [load.document_tokens])
        self._warm_up([*readers, document])
        return insert_document(
            self.engine, readers, document, reader_tokens=most - load.prompt_tokens, settle_tokens=SETTLE_TOKENS
        )

    def _prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """A prompt of each length, all of them different until the text wraps."""
        if self._model.tokenizer is None:
            return random_token_ids(self._model.decoder.config.vocab_size, lengths, SEED)
        text = itertools.chain.from_iterable(text_prompts(self._model.tokenizer, 1))
        return [list(itertools.islice(text, length)) for length in lengths]

    def _warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        closed_loop(self.engine, prompts, WARM_UP, len(prompts), "warm-up")

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._steps.append(event)
        if self._listener is not None:
            self._listener(event)


def _require_success(traces: Sequence[RequestTrace]) -> None:
    errors = [trace.error for trace in traces if trace.error is not None]
    if len(errors) == len(traces):
        raise RequestFailed(f"all {len(traces)} requests failed, the first by {errors[0]}")


def _shifted(step: StepEvent, origin: float) -> StepEvent:
    return step._replace(started=step.started - origin, finished=step.finished - origin)
