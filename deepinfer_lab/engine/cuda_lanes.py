"""The lanes that a placement wants on a GPU: each with streams, graphs and workspaces of its own."""

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from deepinfer_lab.engine.cuda_lane import CudaLane, DeviceClock, Track
from deepinfer_lab.engine.placement import Placement
from deepinfer_lab.engine.sm_partition import PartitionError, partition_streams
from deepinfer_lab.engine.step_graph import StepGraphs
from deepinfer_lab.kernels import preload
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.progress import bar

HIGH = -1  # a stream's priority: lower numbers go first

Streams = Mapping[str, torch.cuda.Stream]


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
    decode_chain: bool = True,
) -> Mapping[str, CudaLane]:
    """The lanes of a placement, their graphs captured.

    Args:
        graphs: replay captured graphs; otherwise launch kernel by kernel.
        chunk_tokens, max_batch, max_context: the largest chunk, batch and sequence that they will be given.
        decode_share: of the multiprocessors, that prefill leaves to decode where the placement divides them; None: the
            placement's own. Where this device, driver or installation cannot, a warning says why, and nothing is divided.
        decode_chain: chain what can be (`Decoder.chain`), as long as no other lane has anything to run.

    A chain never runs twice at once: only one track has it, decode's on all multiprocessors, and a track's steps run in order.
    """
    device = model.device
    clock = DeviceClock(device)
    if graphs and model.uses_kernels:
        preload(device)
    alone, shared = _streams(placement, device, decode_share)
    chain = model.chain(kv) if graphs and decode_chain and _has_whole(placement) else None
    lanes = {}
    for name in placement.lanes:
        phases = ("mixed",) if placement.fused else ()
        phases += ("decode",) if name == placement.decode else ()
        phases += ("prefill",) if name == placement.prefill else ()
        last = torch.zeros(max_batch + 1, dtype=torch.int64, device=device)
        tracks = {}
        for stream in {alone[name]: None, shared[name]: None}:
            captured = None
            if graphs:
                captured = StepGraphs(
                    model, kv, phases=phases, chunk_tokens=chunk_tokens, max_batch=max_batch,
                    max_tokens=min(max_context, kv.num_blocks * kv.block_size), last=last,
                    chain=chain if name == placement.decode and stream is alone[name] else None,
                )  # fmt: skip
                _capture(captured, stream, device, name)
            tracks[stream] = Track(stream, captured)
        beside = lanes.get(placement.prefill)  # which comes first, or is this one
        lanes[name] = CudaLane(name, model, kv, tracks[alone[name]], tracks[shared[name]], clock, last, beside)
    return lanes


def _has_whole(placement: Placement) -> bool:
    """Whether its decode steps may ever have all multiprocessors."""
    return placement.decode_share is None or placement.elastic


def _streams(placement: Placement, device: torch.device, decode_share: float | None) -> tuple[Streams, Streams]:
    """Of each lane its stream while it is the only one that runs, and beside the other."""
    whole = {
        name: torch.cuda.Stream(device, priority=HIGH if placement.priority and name == placement.decode else 0)
        for name in placement.lanes
    }
    if placement.decode_share is None:
        return whole, whole
    try:
        small, rest = partition_streams(device, decode_share or placement.decode_share)
    except PartitionError as reason:
        warnings.warn(f"{reason}; placement '{placement.name}' goes on with all of them for both lanes", stacklevel=3)
        return whole, whole
    parts = {placement.decode: small, placement.prefill: rest}
    return whole if placement.elastic else parts, parts


def _capture(graphs: StepGraphs, stream: torch.cuda.Stream, device: torch.device, name: str) -> None:
    stream.wait_stream(torch.cuda.current_stream(device))  # which loaded the weights
    with torch.inference_mode(), torch.cuda.stream(stream), nothing_collected():
        for shape in bar(list(graphs.shapes()), desc=f"capturing {name}", unit="graph"):
            graphs.capture(shape)
    stream.synchronize()


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage collection inside: graphs of an engine that is gone must not be destroyed while another is captured."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
