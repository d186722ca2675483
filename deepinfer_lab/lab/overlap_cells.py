"""One cell of an overlap experiment: an engine of some policy under some load, as tidy rows."""

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import Event
from deepinfer_lab.engine.policy import Policy, policy_named
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.lab.kernel_dispatch import newest_table
from deepinfer_lab.metrics.kernel_trace import KernelTrace, profiled, read
from deepinfer_lab.metrics.latency import RequestTrace, summarise
from deepinfer_lab.metrics.overlap import Overlap
from deepinfer_lab.model.load import LoadedModel, load_model
from deepinfer_lab.workload.closed_loop import closed_loop
from deepinfer_lab.workload.insertion import insert_document
from deepinfer_lab.workload.text import random_token_ids

KV_MIB = 4096
COUNTERS = ("prefill_decode_overlap_steps", "prefill_decode_stream_overlap_steps")


@dataclass(frozen=True)
class Setting:
    """What is varied.

    Attributes:
        policy: a preset's name, or one made by hand: a function, since a policy serves one engine alone.
        chunk, max_in_flight: the most; an engine can be tuned to less. graphs: as `EngineConfig` has it.
        batch: the most requests at a time.
        itl_target_ms: for policies that have a target.
        decode_share: of the multiprocessors, for placements that divide them; None: the placement's own.
    """

    policy: str | Callable[[], Policy]
    chunk: int
    batch: int
    max_in_flight: int = 4
    graphs: bool = True
    itl_target_ms: float = 20.0
    decode_share: float | None = None

    def made(self) -> Policy:
        return policy_named(self.policy, self.itl_target_ms) if isinstance(self.policy, str) else self.policy()

    def engine(self, model: LoadedModel, context: int, listener: Callable[[Event], None] | None = None) -> Engine:
        """An engine for requests of up to `context` tokens. No prefix cache: a warm-up sends the same prompts."""
        return Engine(
            model.decoder, model.tokenizer,
            EngineConfig(
                policy=self.made(), chunk_tokens=self.chunk, max_batch=self.batch, max_in_flight=self.max_in_flight,
                max_context=context, kv_cache_mib=KV_MIB, prefix_cache=False, cuda_graphs=self.graphs,
                decode_share=self.decode_share,
            ),
            listener,
        )  # fmt: skip

    def columns(self, model: LoadedModel) -> dict[str, Any]:
        """What every row says of its setting."""
        policy = self.made()
        return {
            "policy": policy.name, "placement": policy.placement.name, "sizer": policy.sizer.name, "join": policy.join.name,
            "chunk": self.chunk, "max_in_flight": self.max_in_flight, "graphs": self.graphs,
            "itl_target_ms": self.itl_target_ms, "decode_share": self.decode_share or policy.placement.decode_share,
            "model": model.name, "bits": model.bits,
        }  # fmt: skip


@functools.lru_cache(maxsize=1)
def load_for(spec: str, bits: str, group: int) -> LoadedModel:
    """A model with the newest dispatch table of the card at hand. The last one is kept for whoever asks for the same."""
    return load_model(spec, bits=bits, group=group, dispatch=newest_table())


def random_prompts(model: LoadedModel, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Token ids, drawn uniformly: which ones does not matter to time."""
    return random_token_ids(model.decoder.config.vocab_size, [tokens] * count, seed)


def served(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int
) -> tuple[list[RequestTrace], dict[str, int]]:
    """A closed loop, and by how much the engine's counters moved."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    before = engine.status()
    traces = closed_loop(engine, prompts, params, concurrency, f"load-{time.perf_counter_ns()}")
    after = engine.status()
    return traces, {name: after[name] - before[name] for name in (*COUNTERS, "prefill_steps", "decode_steps")}


def latency_columns(traces: Sequence[RequestTrace]) -> dict[str, Any]:
    """Raw times of a run, in milliseconds to a microsecond: each request's TTFT, and its gaps, request after request."""
    return {
        "requests": len(traces),
        "errors": sum(trace.error is not None for trace in traces),
        "tokens_per_s": summarise(traces).output_tokens_per_s,
        "ttft_ms": [round(trace.ttft * 1e3, 3) for trace in traces if trace.ttft is not None],
        "itl_ms": [round(gap * 1e3, 3) for trace in traces for gap in trace.itl],
    }


def traced(action: Callable[[], object]) -> KernelTrace:
    """When each kernel of an action ran."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profiled(path):
            action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return read(path)


def physical_columns(action: Callable[[], object]) -> dict[str, Any]:
    """What the profiler saw of an action: kernels, and when none ran."""
    overlap = Overlap.of(traced(action))
    covered = overlap.decode_covered
    return {
        "physical_overlap_ms": overlap.physical_overlap_ms,
        "prefill_busy_ms": overlap.prefill_busy_ms,
        "decode_busy_ms": overlap.decode_busy_ms,
        "span_ms": overlap.span_ms,
        "gpu_idle_share": overlap.gpu_idle_share,
        "decode_covered_p50": None if covered is None else covered.p50,
    }


def insertion_row(
    engine: Engine, readers: Sequence[Sequence[int]], document: Sequence[int], reader_tokens: int
) -> dict[str, Any]:
    """A document among readers: their gaps beside it and elsewhere, its TTFT, and when the first of them got its tokens,
    counted from the document's send. It comes in twice, and the second time counts."""
    for _ in range(2):
        before = engine.status()
        seen = insert_document(
            engine, readers, document, reader_tokens=reader_tokens, name=f"insertion-{time.perf_counter_ns()}"
        )
    after = engine.status()
    sent, first = seen.window
    around = 0.1 + 0.25 * (first - sent)
    return {
        "readers": len(readers),
        "document_tokens": len(document),
        "steady_itl_ms": [round(gap * 1e3, 3) for gap in seen.steady_itl],
        "disturbed_itl_ms": [round(gap * 1e3, 3) for gap in seen.disturbed_itl],
        "document_ttft_ms": seen.ttft * 1e3,
        "window_tokens_per_s": seen.tokens_per_s,
        "reader_times_ms": [
            round((at - sent) * 1e3, 3) for at in seen.readers[0].token_times if sent - around <= at <= first + around
        ],
        **{name: after[name] - before[name] for name in COUNTERS},
    }
