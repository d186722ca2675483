"""Twenty thousand short requests: nothing leaks, nothing is mixed up, and the counters add up."""

import dataclasses
import gc
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from bench import Bench, alone_on

from deepinfer_lab.engine.event import Event, StepEvent, TokenEvent
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named

REQUESTS = 20_000


ROUNDS = 20


class Ledger:
    """What was asked and what came back."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.asked: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}
        self.counts: Counter[str] = Counter()

    def ask(self, kind: Request) -> None:
        item = dataclasses.replace(kind, id=f"r{self.counts['asked']}")
        self.counts["asked"] += 1
        self.asked[item.id] = item
        self.bench.scheduler.add(item)

    def cycle(self) -> None:
        with torch.inference_mode():
            self.take(self.bench.scheduler.cycle())

    def cancel(self, name: str) -> None:
        self.take(self.bench.scheduler.cancel(name))

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepEvent):
                self.counts[event.phase] += 1
            elif isinstance(event, TokenEvent):
                assert event.request_id not in self.reasons
                self.tokens[event.request_id].append(event.token)
            else:
                assert event.request_id not in self.reasons
                self.reasons[event.request_id] = event.reason
                self.counts[event.reason.value] += 1

    def settle(self, alone: Callable[[Request], list[int]]) -> None:
        """Everybody has ended, once, and said what was to be said."""
        assert self.reasons.keys() == self.asked.keys()
        for name, item in self.asked.items():
            said, right = self.tokens[name], alone(item)
            cancelled = self.reasons[name] is FinishReason.CANCELLED
            assert said == (right[: len(said)] if cancelled else right)
        for book in (self.asked, self.tokens, self.reasons):
            book.clear()


def test_soak():
    config = dataclasses.replace(SHAPES["tiny"], tied_embeddings=False, num_layers=1, hidden_size=32, vocab_size=64)
    cpu = torch.device("cpu")
    model = build_decoder(
        SyntheticSource(config, "soak"), plan_named("none"), group=32, device=cpu, dtype=torch.float32
    )
    chance, alone = random.Random(1), alone_on(model)
    kinds = [
        Request("", tuple(chance.choices(range(8), k=chance.randint(1, 9))), SamplingParams(new, heat, seed=new))
        for new in (1, 2, 3, 8)
        for heat in (0.0, 1.0)
        for _ in range(10)
    ]
    ledger = Ledger(Bench(model, blocks=8, chunk=8, batch=32))  # room for some three of them
    scheduler, sizes = ledger.bench.scheduler, []
    for _ in range(ROUNDS):
        for _ in range(REQUESTS // ROUNDS // 4):
            for kind in chance.choices(kinds, k=4):
                ledger.ask(kind)
            ledger.cycle()
            if chance.random() < 0.3:
                ledger.cancel(chance.choice([*ledger.asked]))  # live or not
        while scheduler.live():
            ledger.cycle()
        ledger.settle(alone)
        assert ledger.bench.all_blocks_come_back()
        gc.collect()
        sizes.append(sys.getallocatedblocks())
    counts, status = ledger.counts, scheduler.status()
    assert counts["asked"] == counts["length"] + counts["cancelled"] == status["finished_requests"] == REQUESTS
    assert counts["cancelled"] > 200
    assert (counts["prefill"], counts["decode"]) == (status["prefill_steps"], status["decode_steps"])
    assert status["preemptions"] > 0
    assert status["prefix_cache"]["hits"] > 0
    assert sizes[-1] < sizes[3] + 1000  # objects: after the first rounds Python holds no more
