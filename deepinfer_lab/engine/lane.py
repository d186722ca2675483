"""Where work runs. A lane launches and reports; it never touches request state or blocks."""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer_lab.engine.work import Work
from deepinfer_lab.kv.blocks import Fence
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder


class Mark(Fence, Protocol):
    """The end of a launch: a fence that can be waited for, too."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class HostMark:
    """The end of a launch that had run by the time it returned."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class DeviceMark:
    """A CUDA event recorded on the stream right after the launch."""

    event: torch.cuda.Event

    def query(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class Ticket:
    """What came of a launch. Holds every tensor that the device may still read.

    Attributes:
        seq: launches of this lane so far. lane: its name.
        launched: host time of the launch. finished: the mark after the last kernel.
        work: what was launched. logits: [L, vocab]; valid once `finished` has passed.
    """

    seq: int
    lane: str
    launched: float
    finished: Mark
    work: Work
    logits: torch.Tensor


class Lane:
    """Runs work on torch's current stream of the model's device, in order of launch."""

    def __init__(self, name: str, model: Decoder, kv: KVPool) -> None:
        self.name = name
        self._model, self._kv = model, kv
        self._launches = 0

    def launch(self, work: Work) -> Ticket:
        """Enqueue a forward pass. On a CPU it has run by the time this returns."""
        launched = time.perf_counter()
        logits = self._model.forward(work.step, self._kv)
        self._launches += 1
        return Ticket(self._launches, self.name, launched, self.mark(), work, logits)

    def mark(self) -> Mark:
        """The end of all that was enqueued so far, by a launch that failed too."""
        if self._model.device.type != "cuda":
            return HostMark()
        event = torch.cuda.Event()
        event.record()
        return DeviceMark(event)
