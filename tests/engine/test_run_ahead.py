"""Work that is launched before what it goes on from is known: what may fail, and who must not wait for it."""

from collections.abc import Callable

import pytest
import torch
from bench import BLOCK, Bench, alone_on, request

from deepinfer_lab.engine.lane import Ticket
from deepinfer_lab.engine.placement import Placement
from deepinfer_lab.engine.policy import policy_named
from deepinfer_lab.engine.simulated_lane import LATE, SimulatedLane
from deepinfer_lab.engine.step_graph import StepGraphs
from deepinfer_lab.engine.work import Work
from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.step_input import Span

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")


def is_ahead(work: Work) -> bool:
    return any(row >= 0 for row in work.sources)


def failing_once(when: Callable[[Work], bool]) -> type[SimulatedLane]:
    """A lane that launches, and then says that memory lacks: what it enqueued runs all the same."""

    class Failing(SimulatedLane):
        failed = 0

        def launch(self, work: Work, *, shared: bool = False) -> Ticket:
            ticket = super().launch(work)
            if not Failing.failed and when(work):
                Failing.failed += 1
                raise NO_MEMORY
            return ticket

    return Failing


def advance(bench: Bench) -> None:
    for lane in bench.scheduler.lanes.values():
        lane.advance()


def test_a_launch_ahead_that_failed_may_still_write(tiny):
    """Its blocks are nobody else's until it has run."""
    item, newcomer = request("a", 5, 8), request("n", 7, 2)
    end = alone_on(tiny)(item)[1]
    lane = failing_once(is_ahead)
    bench = Bench(tiny, policy=LATE, lane=lane, eos=[end], blocks=2, prefix_cache=False)
    bench.add(item)
    for _ in range(20):
        bench.cycle()
        if bench.reasons:
            break
        bench.scheduler.lanes["prefill"].advance()
    assert lane.failed == 1
    bench.add(newcomer)
    bench.cycle()
    bench.scheduler.lanes["prefill"].advance()
    advance(bench)
    bench.run()
    assert bench.outputs["n"] == alone_on(tiny)(newcomer)
    assert bench.all_blocks_come_back()


def test_a_launch_ahead_that_failed_after_it_had_chosen_tokens(tiny):
    """It is tried again with tokens that the host knows, not with the lane's, which are one step further."""
    items = [request("g", 5, 12), request("d", 4, 6, temperature=1.0, seed=3), request("doc", 60, 1)]
    lane = failing_once(lambda work: is_ahead(work) and not work.greedy)
    bench = Bench(tiny, policy=LATE, lane=lane, chunk=3)
    bench.add(items[0])
    while bench.scheduler.queues.turns or bench.scheduler.queues.waiting:
        bench.cycle()
        bench.scheduler.lanes["prefill"].advance()
    bench.add(*items[1:])
    for _ in range(8):
        bench.cycle()
        bench.scheduler.lanes["prefill"].advance()
    while bench.scheduler.live():
        bench.scheduler.lanes["decode"].advance()
        bench.cycle()
        bench.scheduler.lanes["prefill"].advance()
    assert lane.failed == 1
    assert bench.outputs == {item.id: alone_on(tiny)(item) for item in items}


def test_a_limit_lowered_below_what_is_in_flight(tiny):
    bench = Bench(tiny, policy=LATE, lane=SimulatedLane, chunk=2, in_flight=4)
    bench.add(request("doc", 100, 1))
    for _ in range(4):
        bench.cycle()
    assert len(bench.scheduler.flight) == 4
    bench.scheduler.tune(max_in_flight=1)
    sizes = []
    while bench.scheduler.live():
        bench.cycle()
        sizes.append(len(bench.scheduler.flight))
    assert sizes[:3] == [3, 2, 1]
    assert max(sizes[3:]) <= 1
    assert bench.outputs["doc"] == alone_on(tiny)(request("doc", 100, 1))


@pytest.mark.parametrize("name", ["serial", "dual-stream-async", "priority", "mixed"])
def test_the_oldest_takes_a_block_from_a_prompt_whose_chunks_are_in_flight(tiny, name):
    bench = Bench(tiny, blocks=24, chunk=2, prefix_cache=False, policy=policy_named(name), lane=SimulatedLane)
    bench.add(request("old", 3, 60))
    for _ in range(6):
        bench.cycle()
        advance(bench)
    bench.add(request("doc", 20 * BLOCK, 1))
    longest = stalled = said = 0
    while "old" not in bench.reasons:
        bench.cycle()
        advance(bench)
        now = len(bench.outputs.get("old", []))
        stalled = stalled + 1 if now == said else 0
        longest, said = max(longest, stalled), now
    assert bench.scheduler.queues.preemptions >= 1
    assert longest <= 8  # as long as what was in flight takes, and not the whole prompt
    bench.run()
    assert bench.outputs == {
        item.id: alone_on(tiny)(item) for item in (request("old", 3, 60), request("doc", 20 * BLOCK, 1))
    }


def test_placements_that_cannot_be():
    with pytest.raises(SettingError, match="fused work runs on one lane"):
        Placement("x", "prefill", "decode", fused=True)
    with pytest.raises(SettingError, match="there is one"):
        Placement("x", decode_share=0.5)


@pytest.mark.parametrize("block_size", [1, 16, 2048])
def test_shapes_that_graphs_are_captured_for(tiny, block_size):
    """All of a lane's work finds one that holds it, and no chunk is longer than its cache."""
    kv = KVPool(tiny.kv_shape, 4096 // block_size, block_size, tiny.device, scratch=True)
    graphs = StepGraphs(
        tiny, kv, phases=("mixed", "decode", "prefill"), chunk_tokens=300, max_batch=9, max_tokens=2000,
        last=torch.zeros(10, dtype=torch.int64),
    )  # fmt: skip
    shapes = list(graphs.shapes())
    assert len(shapes) == len(set(shapes))
    assert all(shape.chunk <= shape.columns * block_size for shape in shapes)
    assert max(shape.columns for shape in shapes) * block_size >= 2000 + 300
    for chunk, rows in ((300, 0), (300, 9), (0, 9), (17, 2)):
        assert any(
            shape.chunk >= chunk
            and shape.rows >= rows
            and bool(shape.chunk) == bool(chunk)
            and bool(shape.rows) == bool(rows)
            for shape in shapes
        )


def test_a_long_chunk_that_begins_a_prompt_has_no_columns_but_its_own(tiny, monkeypatch):
    kv = KVPool(tiny.kv_shape, 512, 16, tiny.device, scratch=True)
    graphs = StepGraphs(
        tiny, kv, phases=("mixed", "decode", "prefill"), chunk_tokens=2048, max_batch=4, max_tokens=5000,
        last=torch.zeros(5, dtype=torch.int64),
    )  # fmt: skip
    monkeypatch.setattr(graphs, "capture", lambda shape: shape)
    shapes = list(graphs.shapes())
    assert len(shapes) == len(set(shapes))
    for start, tokens, rows, columns in (
        (0, 512, 0, 32), (0, 400, 0, 32), (0, 1100, 0, 128), (0, 1024, 0, 64), (16, 512, 0, 64), (0, 200, 0, 64),
        (2048, 2048, 0, 256), (0, 512, 1, 64),
    ):  # fmt: skip
        spans = (Span([1] * tokens, start, [0]), *[Span([1], 900, [1])] * rows)
        shape = graphs.for_work(Work("mixed" if rows else "prefill", (), spans, (), 0, ()))
        assert shape.columns == columns
        assert shape in shapes
