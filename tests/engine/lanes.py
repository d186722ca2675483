"""Lanes whose work runs when the test says so: a GPU that is arbitrarily late, and two of them in any order."""

import time
from collections import deque
from dataclasses import dataclass

import torch

from deepinfer_lab.engine.lane import Ticket
from deepinfer_lab.engine.policy import Fixed, Policy
from deepinfer_lab.engine.work import Work
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder


class SimulatedLane:
    """A launch only queues. `advance` runs the oldest forward pass, reading and writing the cache then, not before."""

    def __init__(self, name: str, model: Decoder, kv: KVPool) -> None:
        self.name = name
        self._model, self._kv = model, kv
        self._queue: deque[tuple[Work, torch.Tensor]] = deque()
        self._launched = self.done = 0

    def launch(self, work: Work) -> Ticket:
        logits = torch.full((len(work.step.logits_index), self._model.config.vocab_size), torch.nan)
        self._queue.append((work, logits))
        self._launched += 1
        return Ticket(self._launched, self.name, time.perf_counter(), LateMark(self, self._launched), work, logits)

    def mark(self) -> "LateMark":
        return LateMark(self, self._launched)

    def advance(self) -> bool:
        """Run the oldest piece of work. False where there is none."""
        if not self._queue:
            return False
        work, logits = self._queue.popleft()
        with torch.inference_mode():
            logits.copy_(self._model.forward(work.step, self._kv))
        self.done += 1
        return True


@dataclass(frozen=True)
class LateMark:
    lane: SimulatedLane
    number: int

    def query(self) -> bool:
        return self.lane.done >= self.number

    def wait(self) -> None:
        while not self.query():
            self.lane.advance()


@dataclass(frozen=True)
class TwoLanes:
    name: str = "two-lanes"
    lanes: tuple[str, ...] = ("prefill", "decode")

    def lane_for(self, phase: str) -> str:
        return phase


@dataclass(frozen=True)
class Polled:
    name: str = "polled"
    waits: bool = False


LATE = Policy("late", TwoLanes(), Fixed(), Polled())
