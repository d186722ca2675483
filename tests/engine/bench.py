"""A scheduler on the test's own thread, with every block accounted for after each step, and requests to give it."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch

from deepinfer_lab.engine.event import Event, FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.planner import Limits
from deepinfer_lab.engine.policy import Policy, policy_named
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.scheduler import Scheduler
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder

BLOCK = 4


class Bench:
    """A scheduler and all that came out of it."""

    def __init__(
        self,
        model: Decoder,
        *,
        blocks: int = 64,
        chunk: int = 256,
        batch: int = 64,
        eos: Sequence[int] = (),
        in_flight: int = 4,
        policy: Policy | None = None,
        **more: object,
    ) -> None:
        self.kv = KVPool(model.kv_shape, blocks, BLOCK, model.device)
        limits = Limits(chunk, batch, in_flight)
        self.scheduler = Scheduler(model, self.kv, policy or policy_named("serial"), frozenset(eos), limits, **more)
        self.blocks = blocks
        self.events: list[Event] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def cycle(self) -> list[Event]:
        with torch.inference_mode():
            events = self.scheduler.cycle()
        self.scheduler.check_integrity()
        self.events += events
        return events

    def cancel(self, request_id: str) -> None:
        self.events += self.scheduler.cancel(request_id)
        self.scheduler.check_integrity()

    def run(self) -> "Bench":
        for _ in range(5000):
            if not self.scheduler.live():
                return self
            self.cycle()
        pytest.fail("requests are still live after 5,000 cycles")

    @property
    def outputs(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for event in self.events:
            if isinstance(event, TokenEvent):
                found[event.request_id].append(event.token)
        return dict(found)

    @property
    def reasons(self) -> dict[str, list[FinishReason]]:
        found: dict[str, list[FinishReason]] = defaultdict(list)
        for event in self.events:
            if isinstance(event, FinishEvent):
                found[event.request_id].append(event.reason)
        return dict(found)

    @property
    def steps(self) -> list[StepEvent]:
        return [event for event in self.events if isinstance(event, StepEvent)]

    @property
    def errors(self) -> dict[str, Exception | None]:
        return {event.request_id: event.error for event in self.events if isinstance(event, FinishEvent)}

    def all_blocks_come_back(self) -> bool:
        counts = self.scheduler.status()["blocks"]
        self.scheduler.check_integrity()
        return counts["free"] + counts["cached"] == self.blocks


def alone_on(model: Decoder) -> Callable[[Request], list[int]]:
    """What a request gives when it has a scheduler to itself, all its prompt in one chunk, and nothing cached."""
    known: dict[tuple, list[int]] = {}

    def outputs(item: Request) -> list[int]:
        key = item.prompt, item.params
        if key not in known:
            bench = Bench(model, prefix_cache=False)
            bench.add(item)
            known[key] = bench.run().outputs[item.id]
        return known[key]

    return outputs


def request(name: object, length: int, new: int, **params: object) -> Request:
    prompt = random.Random(f"prompt {name}").choices(range(256), k=length)
    return Request(str(name), tuple(prompt), SamplingParams(max_tokens=new, **params))


MIXED = [
    request("greedy", 13, 12),
    request("block", 2 * BLOCK, 9),
    request("one", 1, 10),
    request("hot", 9, 12, temperature=1.0, seed=5),
    request("narrow", 17, 8, temperature=1.5, top_k=20, seed=6),
    request("nucleus", 4, 11, temperature=0.9, top_p=0.8, seed=7),
]
