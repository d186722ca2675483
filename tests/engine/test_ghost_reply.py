"""The ghost reply: a block handed out while somebody's launched work may still write to it."""

import pytest
from bench import BLOCK, Bench, alone_on, request

from deepinfer_lab.engine.simulated_lane import LATE, SimulatedLane
from deepinfer_lab.kv.blocks import BlockAllocator
from deepinfer_lab.lab.ghost_stage import Hasty


def reply_after_a_cancel(model, allocator: type[BlockAllocator]) -> tuple[list[int], int]:
    """B's tokens where A was cancelled while its decode step was under way, late; and the blocks pending just then."""
    bench = Bench(model, blocks=4, policy=LATE, lane=SimulatedLane, prefix_cache=False)
    memory, lanes = bench.scheduler.memory, bench.scheduler.lanes
    memory.allocator = allocator(bench.blocks)
    bench.add(request("A", 4 * BLOCK - 2, 2))  # all four blocks
    bench.cycle()
    lanes["prefill"].advance()
    bench.cycle()  # A's decode step is launched; it will write to the third slot of its last block
    bench.cancel("A")
    pending = bench.scheduler.status()["blocks"]["pending"]
    bench.add(request("B", 4 * BLOCK - 1, 2))
    bench.cycle()
    lanes["prefill"].advance()  # B's prompt, if it got blocks,
    lanes["decode"].advance()  # and only then A's step
    return bench.run().outputs["B"], pending


def test_a_block_that_skips_pending_carries_another_requests_text(tiny):
    expected = alone_on(tiny)(request("B", 4 * BLOCK - 1, 2))
    ghost, pending = reply_after_a_cancel(tiny, Hasty)
    assert pending == 0
    assert ghost != expected


def test_the_allocator_waits_for_the_fence(tiny):
    expected = alone_on(tiny)(request("B", 4 * BLOCK - 1, 2))
    reply, pending = reply_after_a_cancel(tiny, BlockAllocator)
    assert pending == 4
    assert reply == expected


@pytest.mark.parametrize("finish", ["stop", "cancel"])
def test_a_result_on_its_way_ends_a_request_once(tiny, finish):
    """A's last token, an end-of-sequence token, is computed when the cancel arrives; whoever is first wins, once."""
    item = request("A", 5, 6)
    tokens = alone_on(tiny)(item)
    bench = Bench(tiny, policy=LATE, lane=SimulatedLane, eos=[tokens[0]])
    bench.add(item)
    bench.cycle()
    bench.scheduler.lanes["prefill"].advance()  # the end token is there, and nobody has looked yet
    if finish == "stop":
        bench.cycle()
    bench.cancel("A")
    bench.run()
    for _ in range(3):
        bench.cycle()
    assert [reason.value for reason in bench.reasons["A"]] == ["stop" if finish == "stop" else "cancelled"]
    assert bench.outputs.get("A", []) == (tokens[:1] if finish == "stop" else [])
    assert bench.all_blocks_come_back()
