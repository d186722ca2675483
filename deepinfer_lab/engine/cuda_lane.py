"""A lane of a GPU."""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.profiler import record_function

from deepinfer_lab.engine.lane import Ticket
from deepinfer_lab.engine.step_graph import StepGraph, StepGraphs
from deepinfer_lab.engine.work import KNOWN, Work
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import Carried, to_device

SPAN_MS = 60_000.0

Launched = tuple[
    "DeviceMark", torch.Tensor, torch.Tensor, object
]  # start, logits, likeliest on the host, what must live


class DeviceClock:
    """Times of CUDA events on the host's clock.

    CUDA tells the time between two events as a 32-bit float of milliseconds, which is coarser than 4 microseconds after a
    minute: the event that times count from moves on.
    """

    def __init__(self, device: torch.device) -> None:
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._at = time.perf_counter()

    def time(self, event: torch.cuda.Event) -> float:
        """When an event passed, in `time.perf_counter()` seconds; off by the few microseconds that noticing one takes."""
        ms = self._zero.elapsed_time(event)
        at = self._at + ms / 1e3
        if ms > SPAN_MS:
            self._zero, self._at = event, at
        return at


@dataclass(frozen=True)
class DeviceMark:
    """A CUDA event on a lane's stream."""

    event: torch.cuda.Event
    clock: DeviceClock

    def query(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def time(self) -> float:
        return self.clock.time(self.event)


@dataclass(frozen=True)
class Track:
    """A stream of the model's device, and the forward passes captured on it; None launches kernel by kernel."""

    stream: torch.cuda.Stream
    graphs: StepGraphs | None


class CudaLane:
    """Runs work on streams of its own, in order of launch, each in a range of its phase's name for profilers.

    The tensors of a step are copied on that same stream, and the scheduler's own writes to the cache (blocks that it zeroes)
    come before: a lane waits for them once per launch. The other way round, blocks that the scheduler zeroes are no longer
    read by any lane: their fences have passed.

    Args:
        alone: where work runs while no other lane has any. shared: where it runs beside another's; it may be the same.
        last: int64 [sequences], where the likeliest tokens of the last step with decode rows are kept for the next.
        beside: the device's other lane, if it has one: while that has nothing to run, graphs of this one may be chained.
    """

    asynchronous = True

    def __init__(
        self,
        name: str,
        model: Decoder,
        kv: KVPool,
        alone: Track,
        shared: Track,
        clock: DeviceClock,
        last: torch.Tensor,
        beside: "CudaLane | None" = None,
    ) -> None:
        self.name = name
        self._model, self._kv = model, kv
        self._alone, self._shared, self._track = alone, shared, alone
        self._clock, self._last = clock, last
        self._beside = beside
        self._end: DeviceMark | None = None  # of the newest launch

    def launch(self, work: Work, *, shared: bool = False) -> Ticket:
        """Enqueue a forward pass, the choice of the likeliest tokens, and their way to the host."""
        track, before = self._shared if shared else self._alone, self._track
        if track is not before:
            track.stream.wait_stream(before.stream)
            self._track = track
        track.stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(track.stream), record_function(work.phase):
            if track.graphs is None:
                started, logits, best, kept = self._eagerly(work)
            else:
                graph = track.graphs.for_work(work, alone=self._has_device(shared))
                started, logits, best, kept = self._captured(graph, work)
        self._end = self.mark()
        rows = len(work.sequences)
        return Ticket(self.name, started, self._end, work, logits[:rows], best[:, :rows], kept)

    @property
    def idle(self) -> bool:
        """Whether all that it launched has run."""
        return self._end is None or self._end.query()

    def _has_device(self, shared: bool) -> bool:
        return not shared and (self._beside is None or self._beside.idle)

    def mark(self) -> DeviceMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._track.stream)
        return DeviceMark(event, self._clock)

    def _captured(self, graph: StepGraph, work: Work) -> Launched:
        prepared = graph.prepare(work)
        # Memory first: once the graph has run, the lane's last tokens are this step's, and it cannot be tried again.
        copy = None if work.greedy else torch.empty_like(graph.logits)
        started = self.mark()
        graph.launch(prepared)
        if copy is not None:  # the next launch of this graph writes over its own
            copy.copy_(graph.logits)
        return started, graph.logits if copy is None else copy, prepared.likeliest, prepared

    def _eagerly(self, work: Work) -> Launched:
        started = self.mark()
        step = work.step(self._kv.block_size, self._model.device)
        if any(row != KNOWN for row in work.sources):
            sources = to_device(np.array(work.sources[-len(work.decodes) :]), self._model.device)
            step = replace(step, carried=Carried(self._last, sources))
        logits = self._model.forward(step, self._kv)
        best = self._model.likeliest(logits, self._last if work.decodes else None)
        on_host = torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
        on_host.copy_(best, non_blocking=True)
        return started, logits, on_host, step
