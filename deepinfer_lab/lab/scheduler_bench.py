"""What the scheduler costs by itself: cycles whose forward pass takes no time and whose logits lie ready."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from deepinfer_lab.engine.lane import HostMark, Ticket
from deepinfer_lab.engine.planner import Limits
from deepinfer_lab.engine.policy import policy_named
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.scheduler import Scheduler
from deepinfer_lab.engine.work import Work, prepare_decode
from deepinfer_lab.kv.pool import KVPool, KVShape
from deepinfer_lab.progress import bar

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPT_TOKENS = 512
VOCAB = 256  # greedy sampling takes the largest of so many: next to nothing


@dataclass(frozen=True)
class Overhead:
    """`running` requests, each decoding one token a cycle.

    Attributes (microseconds, one a cycle):
        cycles_us: whole cycles. prepare_us: the part of them that makes a step's tensors.
    """

    running: int
    cycles_us: tuple[float, ...]
    prepare_us: tuple[float, ...]

    @property
    def cycle(self) -> float:
        """Median of a whole cycle."""
        return statistics.median(self.cycles_us)

    @property
    def plan_and_finish(self) -> float:
        """What is left of the median without preparing tensors: planning, reserving, sampling, committing, reporting."""
        return self.cycle - statistics.median(self.prepare_us)


class _NoModel:
    device = CPU


class _NoLane:
    """Has run whatever it is given."""

    asynchronous = False

    def __init__(self, name: str, model: object, kv: KVPool) -> None:
        self.name = name
        self._logits = torch.rand(1024, VOCAB)

    def launch(self, work: Work, *, shared: bool = False) -> Ticket:
        logits = self._logits[: len(work.sequences)]
        work.step(BLOCK_SIZE, CPU)
        now = HostMark(time.perf_counter())
        return Ticket(self.name, now, now, work, logits)


def measure(running: Sequence[int], cycles: int = 200) -> Iterator[Overhead]:
    """Plan, reserve, prepare the tensors, sample greedily and commit one token for each running request, timed by cycle."""
    for count in bar(running, desc="running requests", unit="size"):
        blocks = count * -(-(PROMPT_TOKENS + cycles + count + 32) // BLOCK_SIZE)
        kv = KVPool(KVShape(1, 1, 1, torch.float32), blocks, BLOCK_SIZE, CPU)
        limits = Limits(chunk_tokens=PROMPT_TOKENS, max_batch=count)
        scheduler = Scheduler(_NoModel(), kv, policy_named("serial"), frozenset(), limits, lane=_NoLane)
        for i in range(count):
            prompt = tuple((i + token) % VOCAB for token in range(PROMPT_TOKENS))
            scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=cycles + count + 32)))
        with torch.inference_mode():
            while scheduler.status()["decoding"] < count:
                scheduler.cycle()
            whole = [_timed(scheduler.cycle) for _ in range(cycles)]
            sequences = scheduler.live()
            for sequence in sequences:
                scheduler.memory.grow(sequence)
            prepare = [_timed(lambda s=sequences: prepare_decode(s, 0).step(BLOCK_SIZE, CPU)) for _ in range(cycles)]
        yield Overhead(count, tuple(whole), tuple(prepare))


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e6
