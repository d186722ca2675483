"""Everything in any order: requests, chunks, lanes that finish late and out of turn, cancels, preemptions, evictions."""

import itertools
import unittest

import pytest
from bench import BLOCK, Bench, alone_on
from hypothesis import Phase as Stage
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_lab.engine.request import Phase, Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.simulated_lane import LATE, LATE_FUSED, SimulatedLane
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.kv.blocks import BlockState
from deepinfer_lab.kv.prefix import PrefixCache
from deepinfer_lab.lab.ghost_stage import Hasty
from deepinfer_lab.model.decoder import Decoder

# Few letters and fixed beginnings, so that prefixes are shared; lengths around multiples of the block size of 4.
PROMPTS = st.builds(
    lambda beginning, rest: (*(7, 1, 7, 2, 9, 4, 4, 4, 8, 1, 3, 3)[:beginning], *rest),
    st.sampled_from((0, 3, 4, 8, 12)),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 7),
    temperature=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 3),
    repetition_penalty=st.sampled_from((1.0, 1.3)),
)


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens, blocks stay in order, each request ends once, and says what it would say alone."""

    model: Decoder
    alone: staticmethod

    @initialize(
        blocks=st.integers(6, 16),
        chunk=st.sampled_from((1, 3, 4, 64)),
        batch=st.integers(1, 6),
        in_flight=st.integers(1, 4),
        policy=st.sampled_from((LATE, LATE_FUSED)),
        prefix_cache=st.booleans(),
    )
    def begin(self, blocks, chunk, batch, in_flight, policy, prefix_cache):
        self.bench = Bench(
            self.model, blocks=blocks, chunk=chunk, batch=batch, in_flight=in_flight,
            policy=policy, lane=SimulatedLane, prefix_cache=prefix_cache,
        )  # fmt: skip
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()

    @rule(prompt=PROMPTS, params=PARAMS)
    def submit(self, prompt, params):
        item = Request(f"r{len(self.requests)}", prompt, params)
        self.requests[item.id] = item
        self.bench.add(item)

    @rule()
    def cycle(self):
        self.bench.cycle()

    @rule(first=st.booleans(), count=st.integers(1, 3))
    def complete(self, first, count):
        lanes = list(self.bench.scheduler.lanes.values())
        for _ in range(count):
            lanes[0 if first else -1].advance()

    @precondition(lambda self: self.bench.scheduler.live())
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from([s.request.id for s in self.bench.scheduler.live()]))
        self.cancelled.add(name)
        self.bench.cancel(name)

    @precondition(lambda self: any(not s.in_flight for s in self.bench.scheduler.queues.ready))
    @rule(data=st.data())
    def preempt(self, data):
        ready = [s for s in self.bench.scheduler.queues.ready if not s.in_flight]
        self.bench.scheduler.queues.preempt(data.draw(st.sampled_from(ready)))

    @precondition(lambda self: self.bench.scheduler.memory.prefix is not None)
    @rule(count=st.integers(1, 3))
    def evict(self, count):
        self.bench.scheduler.memory.prefix.evict(count)

    @invariant()
    def blocks_are_in_order(self):
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()
            assert len(self.bench.scheduler.flight) <= self.bench.scheduler._limits.max_in_flight
            for queue in (self.bench.scheduler.queues.ready, self.bench.scheduler.queues.waiting):
                arrivals = [sequence.arrival for sequence in queue]
                assert arrivals == sorted(arrivals)

    @invariant()
    def nobody_is_given_what_late_work_will_write(self):
        if not hasattr(self, "bench"):
            return
        scheduler = self.bench.scheduler
        for ticket in scheduler.flight._tickets:
            if ticket.finished.query():
                continue
            slots = iter(ticket.inputs.slot_mapping.tolist())
            for sequence, count in zip(ticket.work.sequences, ticket.work.counts, strict=True):
                blocks = {slot // BLOCK for slot in itertools.islice(slots, count)}
                if sequence.phase is Phase.FINISHED:
                    states = {scheduler.memory.allocator.state(block) for block in blocks}
                    assert states == {BlockState.PENDING}
                else:
                    assert blocks <= set(sequence.blocks)

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        assert self.bench.reasons.keys() == self.requests.keys()
        for name, item in self.requests.items():
            expected = self.alone(item)
            said = self.bench.outputs.get(name, [])
            if name in self.cancelled:
                assert self.bench.reasons[name] == [FinishReason.CANCELLED]
                assert said == expected[: len(said)]
            else:
                assert self.bench.reasons[name] == [FinishReason.LENGTH]
                assert said == expected
        for lane in self.bench.scheduler.lanes.values():
            while lane.advance():
                pass
        assert self.bench.all_blocks_come_back()


def machine(model: Decoder, **changes: object) -> unittest.TestCase:
    made = type("Machine", (EngineMachine,), {"model": model, "alone": staticmethod(alone_on(model))})
    made.TestCase.settings = settings(stateful_step_count=40, deadline=None, **changes)
    return made.TestCase()


def test_the_engine_under_everything(tiny):
    machine(tiny, max_examples=150).runTest()


class Mistaken(PrefixCache):
    """Takes any block that follows the same parent for the right one."""

    def _slice(self, tokens, index):
        return (0,) * self._block_size


@pytest.mark.parametrize(
    ("where", "broken"),
    [("memory.BlockAllocator", Hasty), ("memory.PrefixCache", Mistaken)],
)
def test_the_machine_finds_what_is_broken(tiny, monkeypatch, where, broken):
    monkeypatch.setattr(f"deepinfer_lab.engine.{where}", broken)
    once = {"max_examples": 500, "derandomize": True, "phases": [Stage.generate], "database": None}
    with pytest.raises(AssertionError):
        machine(tiny, report_multiple_bugs=False, **once).runTest()
