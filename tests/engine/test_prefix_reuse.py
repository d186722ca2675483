"""Requests that begin alike: what is reused, what is not, and that no token shows it."""

import pytest
from bench import BLOCK, Bench, alone_on, request

from deepinfer_lab.engine.event import StepEvent
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams

PREFIX = tuple(range(50, 50 + 3 * BLOCK))


def asking(name: str, *rest: int, new: int = 5, **params: object) -> Request:
    return Request(name, PREFIX + rest, SamplingParams(max_tokens=new, **params))


def prefilled(bench: Bench, name: str) -> int:
    steps = [event for event in bench.events if isinstance(event, StepEvent)]
    return sum(s.tokens for s in steps if s.phase == "prefill" and s.request_ids == (name,))


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_shared_beginning_is_computed_once(tiny, chunk):
    alone, bench = alone_on(tiny), Bench(tiny, chunk=chunk)
    first, second = asking("first", 1, 2), asking("second", 3)
    bench.add(first)
    bench.run()
    bench.add(second)
    bench.run()
    assert (prefilled(bench, "first"), prefilled(bench, "second")) == (3 * BLOCK + 2, 1)
    assert bench.outputs == {item.id: alone(item) for item in (first, second)}
    found = bench.scheduler.status()["prefix_cache"]
    assert (found["queries"], found["hits"], found["hit_tokens"]) == (2, 1, 3 * BLOCK)


def test_a_prompt_that_is_cached_to_its_last_token(tiny):
    """Its length is a multiple of the block size: the last block is computed again, since somebody must give logits."""
    alone, bench = alone_on(tiny), Bench(tiny)
    for name in ("a", "b", "c"):
        bench.add(asking(name))
        bench.run()
        assert bench.outputs[name] == alone(asking(name))
    assert [prefilled(bench, name) for name in "abc"] == [3 * BLOCK, BLOCK, BLOCK]


def test_output_is_reused_as_well_as_prompt(tiny):
    """A second turn: prompt, answer and a new question."""
    alone, bench = alone_on(tiny), Bench(tiny)
    bench.add(asking("turn 1", new=BLOCK + 1))
    bench.run()
    again = asking("turn 2", *bench.outputs["turn 1"], 9)
    bench.add(again)
    bench.run()
    assert prefilled(bench, "turn 2") == 2  # the answer's last token was never fed back, and the question
    assert bench.outputs["turn 2"] == alone(again)


def test_it_can_be_off(tiny):
    bench = Bench(tiny, prefix_cache=False)
    for name in ("a", "b"):
        bench.add(asking(name))
        bench.run()
    assert prefilled(bench, "b") == 3 * BLOCK
    status = bench.scheduler.status()
    assert status["prefix_cache"] is None
    assert status["blocks"]["free"] == bench.blocks


def test_cached_blocks_give_way_to_live_requests(tiny):
    alone, bench = alone_on(tiny), Bench(tiny, blocks=8)
    items = [request(i, 3 * BLOCK + 1, 6) for i in range(6)]
    for item in items:
        bench.add(item)
        bench.run()
    assert bench.outputs == {item.id: alone(item) for item in items}
    assert bench.scheduler.status()["prefix_cache"]["evicted_blocks"] > 0
    assert bench.scheduler.queues.preemptions == 0


def test_two_that_compute_the_same_at_once(tiny):
    alone, bench = alone_on(tiny), Bench(tiny, chunk=BLOCK)
    items = [asking("a", 1), asking("b", 1), asking("c", 2)]
    bench.add(*items)
    bench.run()
    assert bench.outputs == {item.id: alone(item) for item in items}
    assert bench.all_blocks_come_back()


def test_a_duplicate_pins_nothing(tiny):
    """Two compute the same block at once and one ends. The other needs the whole pool, and must not be kept from it by the
    entry that its own blocks hang on beside its copy."""
    alone, bench = alone_on(tiny), Bench(tiny, blocks=6, chunk=4)
    items = [
        Request("first", (1, 1, 1, 1, 5), SamplingParams(max_tokens=1)),
        Request("second", (1, 1, 1, 1, 2, 2, 2, 2, 3), SamplingParams(max_tokens=16)),
    ]
    bench.add(*items)
    bench.run()
    assert bench.outputs == {item.id: alone(item) for item in items}
    assert bench.all_blocks_come_back()


def test_what_must_stay_spare_is_not_evicted(tiny):
    """Newcomers want a block beside their own to be free *or evictable*: what is cached stays until it is needed."""
    bench = Bench(tiny, blocks=24, prefix_cache=True)
    for i in range(6):
        bench.add(request(i, 2 * BLOCK + 1, 4))
        bench.run()
    before = bench.scheduler.status()["blocks"]
    bench.add(*(request(f"new {i}", 2, 2) for i in range(before["free"])))
    for _ in range(before["free"]):
        bench.cycle()
    assert bench.scheduler.status()["prefix_cache"]["evicted_blocks"] == 0


def test_what_a_failed_step_computed_is_not_published(own_tiny):
    healthy = own_tiny.embed.weight[255].clone()
    own_tiny.embed.weight[255] = float("nan")
    bench = Bench(own_tiny)
    prompt = (255,) * (2 * BLOCK + 1)
    bench.add(Request("ill", prompt, SamplingParams(max_tokens=2)))
    bench.run()
    own_tiny.embed.weight[255] = healthy
    bench.add(Request("well", prompt, SamplingParams(max_tokens=2)))
    assert len(bench.run().outputs["well"]) == 2
    assert prefilled(bench, "well") == len(prompt)
