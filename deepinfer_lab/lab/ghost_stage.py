"""A scheduler on lanes that run when told to, with a block allocator that waits or one that does not."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from deepinfer_lab.engine.event import FinishEvent, TokenEvent
from deepinfer_lab.engine.planner import Limits
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.scheduler import Scheduler
from deepinfer_lab.engine.simulated_lane import LATE, SimulatedLane
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.kv.blocks import BlockAllocator, Fence
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named

BLOCK = 16


class Hasty(BlockAllocator):
    """Broken: skips PENDING. Counts the blocks that it hands out `early`, before all their fences have passed."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._fences: dict[int, tuple[Fence, ...]] = {}
        self.early = 0

    def release(self, blocks: Sequence[int], fences: Iterable[Fence]) -> None:
        super().release(blocks, ())
        self._fences |= dict.fromkeys(blocks, tuple(fences))

    def allocate(self, count: int) -> list[int] | None:
        blocks = super().allocate(count)
        for block in blocks or ():
            self.early += not all(fence.query() for fence in self._fences.pop(block, ()))
        return blocks


ALLOCATORS: Mapping[str, type[BlockAllocator]] = {"skips PENDING": Hasty, "waits": BlockAllocator}


class Stage:
    """A scheduler whose lanes run when told to, and all that came out of it.

    Attributes:
        tokens: of each request so far. reasons: why those that ended did.
    """

    def __init__(
        self, model: Decoder, allocator: type[BlockAllocator], blocks: int, block_size: int, eos: Collection[int] = ()
    ) -> None:
        kv = KVPool(model.kv_shape, blocks, block_size, model.device)
        self.scheduler = Scheduler(model, kv, LATE, eos, Limits(), prefix_cache=False, lane=SimulatedLane)
        self.allocator = self.scheduler.memory.allocator = allocator(blocks)
        self.prefill, self.decode = (self.scheduler.lanes[name] for name in LATE.placement.lanes)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}

    def cycle(self) -> None:
        with torch.inference_mode():
            events = self.scheduler.cycle()
        for event in events:
            if isinstance(event, TokenEvent):
                self.tokens[event.request_id].append(event.token)
            elif isinstance(event, FinishEvent):
                self.reasons[event.request_id] = event.reason

    def cancel(self, name: str) -> None:
        self.reasons |= {event.request_id: event.reason for event in self.scheduler.cancel(name)}

    def blocks_of(self, name: str) -> list[int]:
        return next((list(s.blocks) for s in self.scheduler.live() if s.request.id == name), [])

    def run(self) -> "Stage":
        while self.scheduler.busy():
            self.cycle()
        return self


def small_model() -> Decoder:
    """Random weights. Untied, or it would only repeat its last token."""
    source = SyntheticSource(dataclasses.replace(SHAPES["tiny"], tied_embeddings=False), "tiny")
    return build_decoder(source, plan_named("none"), group=64, device=torch.device("cpu"), dtype=torch.float32)


def made_up(name: str, length: int, new: int) -> Request:
    """A request for `new` tokens whose prompt is `length` random ones; the same name gives the same prompt."""
    return Request(name, tuple(random.Random(name).choices(range(256), k=length)), SamplingParams(max_tokens=new))


def alone(model: Decoder, request: Request, eos: Collection[int] = ()) -> list[int]:
    """What a request gives where nobody else is there."""
    total = len(request.prompt) + request.params.max_tokens
    stage = Stage(model, BlockAllocator, -(-total // BLOCK), BLOCK, eos)
    stage.scheduler.add(request)
    return stage.run().tokens[request.id]
