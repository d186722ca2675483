"""Lanes whose work runs when somebody says so: a GPU that is arbitrarily late, and two of them in any order.

For tests and experiments on what order does to results. Serves nobody.
"""

import time
from collections import deque
from dataclasses import dataclass, replace

import torch

from deepinfer_lab.engine.lane import HostMark, Ticket
from deepinfer_lab.engine.placement import FUSED, TWO_LANES
from deepinfer_lab.engine.policy import ASYMMETRIC, Policy
from deepinfer_lab.engine.sizer import Fixed
from deepinfer_lab.engine.work import KNOWN, Work
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import StepInput


class SimulatedLane:
    """A launch only queues. `advance` runs the oldest forward pass, reading and writing the cache then, not before.

    Like a GPU lane, it remembers the likeliest tokens of its last decode step for the next.
    """

    asynchronous = True

    def __init__(self, name: str, model: Decoder, kv: KVPool) -> None:
        self.name = name
        self._model, self._kv = model, kv
        self._queue: deque[tuple[StepInput, Ticket]] = deque()
        self._last = torch.empty(0, dtype=torch.int64)
        self._launched = self.done = 0

    def launch(self, work: Work, *, shared: bool = False) -> Ticket:
        step = work.step(self._kv.block_size, self._model.device)
        logits = torch.full((len(step.logits_index), self._model.config.vocab_size), torch.nan)
        best = torch.full((2, len(logits)), torch.nan, dtype=torch.float64)
        self._launched += 1
        mark = LateMark(self, self._launched)
        ticket = Ticket(self.name, HostMark(time.perf_counter()), mark, work, logits, best, step)
        self._queue.append((step, ticket))
        return ticket

    def mark(self) -> "LateMark":
        return LateMark(self, self._launched)

    def advance(self) -> bool:
        """Run the oldest piece of work. False where there is none."""
        if not self._queue:
            return False
        step, ticket = self._queue.popleft()
        if any(row != KNOWN for row in ticket.work.sources):  # decode rows are the last ones
            tokens = step.token_ids.clone()
            for place, row in zip(step.logits_index, ticket.work.sources, strict=True):
                tokens[place] = self._last[row] if row != KNOWN else tokens[place]
            step = replace(step, token_ids=tokens)
        with torch.inference_mode():
            ticket.logits.copy_(self._model.forward(step, self._kv))
            ticket.likeliest.copy_(self._model.likeliest(ticket.logits))
        if ticket.work.decodes:
            self._last = ticket.likeliest[1].long()
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

    def time(self) -> float:
        return time.perf_counter()


LATE = Policy("late", TWO_LANES, Fixed(), ASYMMETRIC)
LATE_FUSED = Policy("late-fused", FUSED, Fixed(), ASYMMETRIC)
