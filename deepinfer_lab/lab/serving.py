"""Serving a model under load and turning what happened into tidy rows. Shared by notebooks and `bench serve`."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import Event, StepEvent
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import SettingError
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.model.load import LoadedModel
from deepinfer_lab.workload.closed_loop import closed_loop
from deepinfer_lab.workload.text import prompts

WARM_UP = SamplingParams(max_tokens=4, ignore_eos=True)


@dataclass(frozen=True)
class Load:
    """A closed-loop load: `concurrency` clients, each sending `requests_per_client` requests one after the other.

    Raises:
        SettingError: a size below 1.
    """

    concurrency: int
    prompt_tokens: int = 128
    output_tokens: int = 64
    requests_per_client: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise SettingError(f"{name.replace('_', '-')} {value}: allowed is 1 or more")


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
    """An engine that serves loads of text from the reference text and remembers its steps. A context manager.

    Its prefix cache is off: the warm-up sends the same prompts, and reading them is part of what is measured.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        if model.tokenizer is None:
            raise SettingError(f"model '{model.name}' has no tokenizer, so no text can be cut into prompts for it")
        self._tokenizer = model.tokenizer
        self._steps: list[StepEvent] = []
        self.engine = Engine(model.decoder, model.tokenizer, replace(config, prefix_cache=False), listener=self._note)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()

    def serve(self, load: Load) -> LoadResult:
        """Warm up, then run a load. Every request generates exactly `output_tokens`, whatever the model says."""
        texts = list(
            itertools.islice(prompts(self._tokenizer, load.prompt_tokens), load.concurrency * load.requests_per_client)
        )
        closed_loop(self.engine, texts[: load.concurrency], WARM_UP, load.concurrency, "warm-up")
        self._steps.clear()
        params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=True)
        origin = time.perf_counter()
        traces = closed_loop(self.engine, texts, params, load.concurrency, f"c{load.concurrency}", origin)
        return LoadResult(load, tuple(traces), tuple(_shifted(step, origin) for step in self._steps))

    def _note(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._steps.append(event)


def _shifted(step: StepEvent, origin: float) -> StepEvent:
    return step._replace(started=step.started - origin, finished=step.finished - origin)
