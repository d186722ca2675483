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
    """A point in what a lane runs: a fence that can be waited for, too, and that knows when it passed."""

    def wait(self) -> None: ...

    def time(self) -> float:
        """When it passed, in `time.perf_counter()` seconds. To be asked only once it has."""
        ...


@dataclass(frozen=True)
class HostMark:
    """A point that the host itself has passed."""

    at: float

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def time(self) -> float:
        return self.at


@dataclass(frozen=True)
class Ticket:
    """What came of a launch. Holds every tensor that the device may still read.

    Attributes:
        lane: its name.
        started, finished: before the first kernel, and after the last.
        work: what was launched.
        logits: [L, vocab], as the model makes them, in the order of the work's sequences; valid once `finished` has passed.
        likeliest: on the host, float64 [2, L]: of each row the largest logit, and its token; None where the lane did not look.
        inputs: tensors that must live until `finished` has passed.
    """

    lane: str
    started: Mark
    finished: Mark
    work: Work
    logits: torch.Tensor
    likeliest: torch.Tensor | None = None
    inputs: object = None


class Lane(Protocol):
    """In order of launch.

    asynchronous: a launch returns before it has run, so that lanes run side by side, and decode work may come whose tokens the
        lane has chosen itself and the host has not seen (`Work.sources`).
    """

    name: str
    asynchronous: bool

    def launch(self, work: Work, *, shared: bool = False) -> Ticket:
        """Enqueue a forward pass, without waiting for it.

        Args:
            shared: another lane has work meanwhile, and this one is to keep to its part of the device, where it has one.
        """
        ...

    def mark(self) -> Mark:
        """The end of all that was enqueued so far, by a launch that failed too."""
        ...


class HostLane:
    """Runs work at once: on a CPU, a launch has run by the time it returns."""

    asynchronous = False

    def __init__(self, name: str, model: Decoder, kv: KVPool) -> None:
        self.name = name
        self._model, self._kv = model, kv

    def launch(self, work: Work, *, shared: bool = False) -> Ticket:
        started = HostMark(time.perf_counter())
        logits = self._model.forward(work.step(self._kv.block_size, self._model.device), self._kv)
        return Ticket(self.name, started, self.mark(), work, logits)

    def mark(self) -> Mark:
        return HostMark(time.perf_counter())
