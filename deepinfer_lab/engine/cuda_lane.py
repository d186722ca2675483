"""Lanes of a GPU: each a CUDA stream with its own graphs and workspaces."""

import gc
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import record_function

from deepinfer_lab.engine.lane import Ticket
from deepinfer_lab.engine.placement import Placement
from deepinfer_lab.engine.sm_partition import PartitionError, partition_streams
from deepinfer_lab.engine.step_graph import LastTokens, StepGraph, StepGraphs, likeliest
from deepinfer_lab.engine.work import KNOWN, Work
from deepinfer_lab.kernels import preload
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import to_device
from deepinfer_lab.progress import bar

HIGH = -1  # a stream's priority: lower numbers go first
SPAN_MS = 60_000.0


Launched = tuple["DeviceMark", torch.Tensor, torch.Tensor, object]  # start, logits, likeliest, what must live


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


class CudaLane:
    """Runs work on a stream of its own, in order of launch, each in a range of its phase's name for profilers.

    The tensors of a step are copied on that same stream, and the scheduler's own writes to the cache (blocks that it zeroes)
    come before: a lane waits for them once per launch. The other way round, blocks that the scheduler zeroes are no longer
    read by any lane: their fences have passed.

    Args:
        stream: of the model's device.
        graphs: captured forward passes; None launches kernel by kernel.
    """

    asynchronous = True

    def __init__(
        self,
        name: str,
        model: Decoder,
        kv: KVPool,
        stream: torch.cuda.Stream,
        clock: DeviceClock,
        graphs: StepGraphs | None,
        last: LastTokens,
    ) -> None:
        self.name = name
        self._model, self._kv = model, kv
        self._stream, self._clock = stream, clock
        self._graphs, self._last = graphs, last
        self._launches = 0

    def launch(self, work: Work) -> Ticket:
        """Enqueue a forward pass, the choice of the likeliest tokens, and their way to the host."""
        self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(self._stream), record_function(work.phase):
            if self._graphs is None:
                started, logits, best, kept = self._eagerly(work)
            else:
                started, logits, best, kept = self._captured(self._graphs.for_work(work), work)
            on_host = torch.empty(best.shape, dtype=best.dtype, pin_memory=True)
            on_host.copy_(best, non_blocking=True)
        self._launches += 1
        rows = len(work.sequences)
        return Ticket(
            self._launches, self.name, started, self.mark(), work, logits[:rows], on_host[:, :rows], (kept, on_host)
        )

    def mark(self) -> DeviceMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return DeviceMark(event, self._clock)

    def _captured(self, graph: StepGraph, work: Work) -> Launched:
        prepared = graph.prepare(work)
        # Memory first: once the graph has run, the lane's last tokens are this step's, and it cannot be tried again.
        copy = None if work.greedy else torch.empty_like(graph.logits)
        started = self.mark()
        graph.launch(prepared)
        if copy is not None:  # the next launch of this graph writes over its own
            copy.copy_(graph.logits)
        return started, graph.logits if copy is None else copy, graph.likeliest, prepared

    def _eagerly(self, work: Work) -> Launched:
        started = self.mark()
        step = work.step(self._kv.block_size, self._model.device)
        if any(row != KNOWN for row in work.sources):
            rows = step.token_ids[-len(work.decodes) :]
            sources = to_device(np.array(work.sources[-len(work.decodes) :]), rows.device)
            rows.copy_(self._last.fill_in(rows, sources))
        logits = self._model.forward(step, self._kv)
        best = likeliest(logits)
        if work.decodes:
            self._last.remember(best)
        return started, logits, best, step


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage collection inside: graphs of an engine that is gone must not be destroyed while another is captured."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def cuda_lanes(
    placement: Placement,
    model: Decoder,
    kv: KVPool,
    *,
    graphs: bool,
    chunk_tokens: int,
    max_batch: int,
    max_context: int,
    decode_share: float | None,
) -> Mapping[str, CudaLane]:
    """The lanes of a placement, their graphs captured.

    Args:
        graphs: replay captured graphs; otherwise launch kernel by kernel.
        chunk_tokens, max_batch, max_context: the largest chunk, batch and sequence that they will be given.
        decode_share: of the multiprocessors, that prefill leaves to decode where the placement divides them; None: the
            placement's own. Where this device, driver or installation cannot, a warning says why, and nothing is divided.
    """
    device = model.device
    streams = {
        name: torch.cuda.Stream(device, priority=HIGH if placement.priority and name == placement.decode else 0)
        for name in placement.lanes
    }
    if placement.decode_share is not None:
        try:
            small, rest = partition_streams(device, decode_share or placement.decode_share)
        except PartitionError as reason:
            warnings.warn(
                f"{reason}; placement '{placement.name}' goes on with all of them for both lanes", stacklevel=2
            )
        else:
            streams[placement.prefill] = rest
            if not placement.confined:
                streams[placement.decode] = small
    clock = DeviceClock(device)
    if graphs and model.uses_kernels:
        preload(device)
    lanes = {}
    for name, stream in streams.items():
        phases = ("mixed",) if placement.fused else ()
        phases += ("decode",) if name == placement.decode else ()
        phases += ("prefill",) if name == placement.prefill else ()
        step_graphs = None
        if graphs:
            longest = min(max_context, kv.num_blocks * kv.block_size)
            step_graphs = StepGraphs(
                model, kv, phases=phases, chunk_tokens=chunk_tokens, max_batch=max_batch, max_tokens=longest
            )
            stream.wait_stream(torch.cuda.current_stream(device))  # which loaded the weights
            with torch.inference_mode(), torch.cuda.stream(stream), _nothing_collected():
                for shape in bar(list(step_graphs.shapes()), desc=f"capturing {name}", unit="graph"):
                    step_graphs.capture(shape)
            stream.synchronize()
        last = step_graphs.last if step_graphs else LastTokens(max_batch + 1, device)
        lanes[name] = CudaLane(name, model, kv, stream, clock, step_graphs, last)
    return lanes
