"""`bench serve`: our engine under closed loops, beside transformers in the same run."""

import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.lab import baseline
from deepinfer_lab.lab.serving import Load, Server
from deepinfer_lab.metrics.bandwidth import read_bandwidth
from deepinfer_lab.metrics.latency import RequestTrace, RunSummary, summarise
from deepinfer_lab.model.load import LoadedModel
from deepinfer_lab.progress import bar
from deepinfer_lab.workload.text import prompts


@dataclass(frozen=True)
class Measured:
    """One system under one load, over all rounds.

    Attributes:
        system: "deepinfer-lab" or "transformers". bits: of its weights. concurrency: clients.
        rounds: one summary a round, in order.
        roofline_share: share of the measured read bandwidth that the weights alone account for, at the median TPOT:
            step_bytes / (TPOT * bandwidth). With many clients one read serves them all. None for systems whose bytes we
            do not know.
    """

    system: str
    bits: str
    concurrency: int
    rounds: tuple[RunSummary, ...]
    roofline_share: float | None

    @property
    def tokens_per_s(self) -> float:
        """Median over rounds."""
        return statistics.median(r.output_tokens_per_s for r in self.rounds)

    @property
    def tpot_s(self) -> float:
        """Median over rounds of the median TPOT."""
        return statistics.median(r.tpot.p50 for r in self.rounds if r.tpot is not None)

    def row(self) -> dict[str, Any]:
        """For JSON: everything, raw rounds included."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "tpot_s": self.tpot_s}


def peak_memory_bytes() -> int | None:
    """The most memory that this process has held so far; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(
    model: LoadedModel, config: EngineConfig, loads: list[Load], rounds: int, against: str | None, spec: str
) -> Iterator[Measured]:
    """Run all loads `rounds` times, systems taking turns within a round so that a slow minute hits all alike.

    Args:
        against: "transformers" adds single-stream `generate` of the same checkpoint, unquantised; None adds nothing.
        spec: where the checkpoint is.

    Raises:
        MissingDependency: transformers is not installed.
        ModelNotFound: no checkpoint that transformers could read.
    """
    device = model.decoder.device
    bandwidth = read_bandwidth(device)
    rival = baseline.load(spec, device) if against == "transformers" else None
    ours: dict[int, list[RunSummary]] = {load.concurrency: [] for load in loads}
    theirs: list[RunSummary] = []
    for _ in bar(range(rounds), desc="rounds", unit="round"):
        # A server per round: while ours serves the other holds no threads, and the other way round.
        with Server(model, config) as server:
            for load in loads:
                ours[load.concurrency].append(summarise(server.serve(load).traces))
        if rival is not None:
            theirs.append(summarise(_rival_round(rival, model, loads[0])))
    for concurrency, summaries in ours.items():
        result = Measured("deepinfer-lab", model.bits, concurrency, tuple(summaries), None)
        yield replace(result, roofline_share=model.decoder.step_bytes / (result.tpot_s * bandwidth))
    if theirs:
        yield Measured("transformers", "none", 1, tuple(theirs), None)


def _rival_round(rival: Any, model: LoadedModel, load: Load) -> list[RequestTrace]:
    """The same prompts, one after the other. Each trace starts at its own send; they are laid end to end."""
    traces, at = [], 0.0
    texts = itertools.islice(prompts(model.tokenizer, load.prompt_tokens), load.requests_per_client)
    for i, prompt in enumerate(texts):
        trace = baseline.generate(rival, prompt, load.output_tokens, f"transformers-{i}")
        times = tuple(at + t for t in trace.token_times)
        traces.append(RequestTrace(trace.request_id, trace.prompt_tokens, at, times))
        at = times[-1]
    return traces
