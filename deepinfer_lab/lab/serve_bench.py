"""`bench serve`: our engine under closed loops beside transformers, under open loops, and while a document comes in."""

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.event import Event
from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab import baseline
from deepinfer_lab.lab.load_spec import InsertionLoad, Load, OpenLoad
from deepinfer_lab.lab.serving import Server
from deepinfer_lab.metrics.bandwidth import read_bandwidth
from deepinfer_lab.metrics.latency import RequestTrace, RunSummary, Spread, summarise
from deepinfer_lab.model.load import LoadedModel
from deepinfer_lab.progress import bar
from deepinfer_lab.workload.insertion import Insertion
from deepinfer_lab.workload.open_loop import OpenLoopResult
from deepinfer_lab.workload.text import prompts

Listener = Callable[[Event], None]

KEPT_UP = 0.95  # of the offered rate: below it, the load was not the one asked for


@dataclass(frozen=True)
class Measured:
    """One system under one closed load, over all rounds.

    Attributes:
        system: "deepinfer-lab" or "transformers". bits: of its weights.
        rounds: one summary a round, in order.
        roofline_share: share of the measured read bandwidth that the weights alone account for, at the median TPOT:
            step_bytes / (TPOT * bandwidth). With many clients one read serves them all. None for systems whose bytes we
            do not know, and where requests of one token have no TPOT.
    """

    system: str
    bits: str
    load: Load
    rounds: tuple[RunSummary, ...]
    roofline_share: float | None

    @property
    def tokens_per_s(self) -> float:
        """Median over rounds."""
        return statistics.median(r.output_tokens_per_s for r in self.rounds)

    @property
    def tpot_s(self) -> float | None:
        """Median over rounds of the median TPOT; None where requests of one token have none."""
        return _median(r.tpot.p50 for r in self.rounds if r.tpot is not None)

    def row(self) -> dict[str, Any]:
        """For JSON: everything, raw rounds included."""
        fields = asdict(self)
        load = fields.pop("load")
        return {"load": "closed", **load, **fields, "tokens_per_s": self.tokens_per_s, "tpot_s": self.tpot_s}


@dataclass(frozen=True)
class OpenRound:
    """One round of an open load: rates in requests a second, as `OpenLoopResult` has them."""

    summary: RunSummary
    offered_rate: float | None
    achieved_rate: float | None
    max_lateness_s: float

    @classmethod
    def of(cls, result: OpenLoopResult) -> "OpenRound":
        return cls(summarise(result.traces), result.offered_rate, result.achieved_rate, result.max_lateness)


@dataclass(frozen=True)
class OpenMeasured:
    """Our engine under one open load, over all rounds."""

    bits: str
    load: OpenLoad
    rounds: tuple[OpenRound, ...]

    @property
    def offered_rate(self) -> float | None:
        """The same in every round; None where all requests were due at once."""
        return self.rounds[0].offered_rate

    @property
    def achieved_rate(self) -> float | None:
        """Median over rounds."""
        return _median(r.achieved_rate for r in self.rounds if r.achieved_rate is not None)

    @property
    def kept_up(self) -> bool:
        """Whether the load was the one asked for. What was due at once has no rate to fall short of."""
        offered, achieved = self.offered_rate, self.achieved_rate
        return offered is None or achieved is None or achieved >= KEPT_UP * offered

    def row(self) -> dict[str, Any]:
        """For JSON: everything, each request's size and due time included."""
        fields = asdict(self)
        load = fields.pop("load")
        kept_up = {"achieved_rate": self.achieved_rate, "kept_up": self.kept_up}
        return {"system": "deepinfer-lab", "load": load.pop("name"), **load, **fields, **kept_up}


@dataclass(frozen=True)
class InsertionRound:
    """One round of an insertion: gaps of the readers, in seconds, beside the document and elsewhere."""

    steady_itl: Spread
    beside_itl: Spread
    document_ttft_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, seen: Insertion) -> "InsertionRound":
        steady, beside = Spread.of(seen.steady_itl), Spread.of(seen.disturbed_itl)
        assert steady is not None, "all readers decode for a while before the document comes"
        assert beside is not None, "all readers decode until after it"
        return cls(steady, beside, seen.ttft, seen.tokens_per_s)


@dataclass(frozen=True)
class InsertionMeasured:
    """Our engine while a document comes in, over all rounds."""

    bits: str
    load: InsertionLoad
    rounds: tuple[InsertionRound, ...]

    def row(self) -> dict[str, Any]:
        """For JSON: everything."""
        fields = asdict(self)
        return {"system": "deepinfer-lab", "load": "insertion", **fields.pop("load"), **fields}


def peak_memory_bytes() -> int | None:
    """The most memory that this process has held so far; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(
    model: LoadedModel,
    config: EngineConfig,
    loads: list[Load],
    rounds: int,
    against: str | None,
    spec: str,
    listener: Listener | None = None,
) -> Iterator[Measured]:
    """Run all closed loads `rounds` times, systems taking turns within a round so that a slow minute hits all alike.

    Args:
        against: "transformers" adds single-stream `generate` of the same checkpoint, unquantised; None adds nothing.
        spec: where the checkpoint is.
        listener: hears our engine's events of the last round.

    Raises:
        MissingDependency: transformers is not installed.
        ModelNotFound: no checkpoint that transformers could read.
        SettingError: a model without a tokenizer, beside transformers.
        RequestFailed: not one request of a load ended well.
    """
    device = model.decoder.device
    rival = baseline.load(spec, device) if against == "transformers" else None
    if rival is not None and model.tokenizer is None:
        raise SettingError(
            f"model '{model.name}' has no tokenizer, so no text can be cut into prompts for transformers"
        )
    bandwidth = read_bandwidth(device)
    ours: dict[Load, list[RunSummary]] = {load: [] for load in loads}
    theirs: list[RunSummary] = []
    for heard in _rounds(rounds, listener):
        # A server per round: while ours serves the other holds no threads, and the other way round.
        with Server(model, config, heard) as server:
            for load in loads:
                ours[load].append(summarise(server.serve(load).traces))
        if rival is not None:
            theirs.append(summarise(_rival_round(rival, model, loads[0])))
    for load, summaries in ours.items():
        result = Measured("deepinfer-lab", model.bits, load, tuple(summaries), None)
        share = result.tpot_s and model.decoder.step_bytes / (result.tpot_s * bandwidth)
        yield replace(result, roofline_share=share)
    if theirs:
        yield Measured("transformers", "none", replace(loads[0], concurrency=1), tuple(theirs), None)


def measure_open(
    model: LoadedModel, config: EngineConfig, load: OpenLoad, rounds: int, listener: Listener | None = None
) -> OpenMeasured:
    """Run an open load `rounds` times. For the other arguments see `measure`, for errors `Server.serve_open`."""
    found = []
    for heard in _rounds(rounds, listener):
        with Server(model, config, heard) as server:
            found.append(OpenRound.of(server.serve_open(load)))
    return OpenMeasured(model.bits, load, tuple(found))


def measure_insertion(
    model: LoadedModel, config: EngineConfig, load: InsertionLoad, rounds: int, listener: Listener | None = None
) -> InsertionMeasured:
    """Insert a document `rounds` times. For the other arguments see `measure`, for errors `Server.insert`."""
    found = []
    for heard in _rounds(rounds, listener):
        with Server(model, config, heard) as server:
            found.append(InsertionRound.of(server.insert(load)))
    return InsertionMeasured(model.bits, load, tuple(found))


def _rounds(rounds: int, listener: Listener | None) -> Iterable[Listener | None]:
    """Who hears each round: nobody but for the last."""
    return bar([None] * (rounds - 1) + [listener], desc="rounds", unit="round")


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


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
