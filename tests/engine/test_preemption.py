"""A pool that is too small for everybody: who gives way, who goes on, and that nobody's text shows it."""

import random

import pytest
from bench import BLOCK, MIXED, Bench, alone_on, request

from deepinfer_lab.engine.event import FinishEvent
from deepinfer_lab.engine.simulated_lane import LATE, SimulatedLane
from deepinfer_lab.engine.stopping import FinishReason


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_everybody_grows_out_of_a_full_pool(tiny, prefix_cache):
    """Four requests fill the pool with their prompts alone; each grows to twice that."""
    alone = alone_on(tiny)
    items = [request(i, 2 * BLOCK - 1, 2 * BLOCK, temperature=float(i % 2), seed=i) for i in range(4)]
    bench = Bench(tiny, blocks=8, prefix_cache=prefix_cache)
    bench.add(*items)
    bench.run()
    assert bench.scheduler.queues.preemptions > 0
    assert bench.outputs == {item.id: alone(item) for item in items}
    ends = [event.request_id for event in bench.events if isinstance(event, FinishEvent)]
    assert ends == ["0", "1", "2", "3"]  # the oldest goes on, always
    assert bench.all_blocks_come_back()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_preempted_after_every_step(tiny, share, chunk, prefix_cache):
    """Random draws and repetition penalties included: what a token depends on survives with the request."""
    alone, chance = alone_on(tiny), random.Random(chunk)
    items = [*MIXED[:5], request("penalty", 6, 9, repetition_penalty=1.5, temperature=0.7, seed=9)]
    bench = Bench(tiny, blocks=40, chunk=chunk, prefix_cache=prefix_cache)
    bench.add(*items)
    for _ in range(60):
        bench.cycle()
        for sequence in list(bench.scheduler.queues.ready):
            if chance.random() < share:
                bench.scheduler.queues.preempt(sequence)
                bench.scheduler.check_integrity()
    bench.run()
    assert bench.scheduler.queues.preemptions > 20
    assert bench.outputs == {item.id: alone(item) for item in items}
    assert bench.all_blocks_come_back()


def test_two_hundred_requests_into_a_pool_that_holds_two(tiny):
    alone = alone_on(tiny)
    items = [request(i, 5 + i % 4, 8) for i in range(200)]  # each takes 3 or 4 blocks in the end
    bench = Bench(tiny, blocks=7, chunk=4, prefix_cache=False)
    bench.add(*items)
    bench.run()
    assert bench.reasons == {item.id: [FinishReason.LENGTH] for item in items}
    assert all(bench.outputs[item.id] == alone(item) for item in items[::10])
    assert bench.all_blocks_come_back()


def test_a_victim_in_flight_is_left_alone(tiny):
    """Its blocks would not be free at once: taking them would cost its work and gain nothing."""
    bench = Bench(tiny, blocks=4, policy=LATE, lane=SimulatedLane, prefix_cache=False)
    bench.add(request("old", 2 * BLOCK, 3), request("young", BLOCK, 3))
    prefill = bench.scheduler.lanes["prefill"]
    bench.cycle()
    prefill.advance()
    bench.cycle()  # `old` takes the last free block and decodes, `young` reads its prompt: both are in flight
    assert [s.in_flight for s in bench.scheduler.queues.ready] == [1, 1]
    old, _ = bench.scheduler.queues.ready
    assert bench.scheduler.queues.victim(old) is None
    bench.run()
    assert bench.outputs == {name: alone_on(tiny)(request(name, n, 3)) for name, n in (("old", 8), ("young", 4))}


def test_who_comes_back_takes_its_old_place(tiny):
    """Blocks are given out in order of arrival: otherwise an older request could take those of one chosen before it."""
    bench = Bench(tiny, prefix_cache=False)
    bench.add(*(request(i, 3, 9) for i in range(4)))
    for _ in range(5):
        bench.cycle()
    bench.scheduler.queues.preempt(bench.scheduler.queues.ready[1])
    bench.cycle()
    assert [sequence.arrival for sequence in bench.scheduler.queues.ready] == [0, 1, 2, 3]


def test_an_older_request_that_came_back_takes_from_a_younger_one(tiny):
    """The younger one needs no block itself and would have been chosen for the same step."""
    bench = Bench(tiny, blocks=5, prefix_cache=False)
    bench.add(request("old", 2 * BLOCK - 1, 8), request("young", 2 * BLOCK - 2, 8))
    for _ in range(2):
        bench.cycle()
    bench.scheduler.queues.preempt(bench.scheduler.queues.ready[0])
    bench.run()
    assert bench.outputs == {name: alone_on(tiny)(request(name, n, 8)) for name, n in (("old", 7), ("young", 6))}
    assert bench.all_blocks_come_back()


def test_a_newcomer_leaves_room_for_the_next_token_of_everybody(tiny):
    bench = Bench(tiny, blocks=4, prefix_cache=False)
    bench.add(request("first", 2 * BLOCK, 4), request("second", 2 * BLOCK, 4))
    bench.run()
    assert bench.scheduler.queues.preemptions == 0
