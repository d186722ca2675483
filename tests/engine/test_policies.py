"""Every way of sharing the machine gives every request the same tokens, and the counters say what ran beside what."""

from dataclasses import replace

import pytest
import torch
from bench import BLOCK, MIXED, Bench, alone_on, request

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.lane import Ticket
from deepinfer_lab.engine.policy import BARRIER, PRESETS, policy_named
from deepinfer_lab.engine.simulated_lane import LATE, LATE_FUSED, SimulatedLane
from deepinfer_lab.engine.sizer import Adaptive, Fixed
from deepinfer_lab.engine.work import Work
from deepinfer_lab.errors import SettingError


def late(model, policy=LATE, **more) -> Bench:
    return Bench(model, policy=policy, lane=SimulatedLane, **more)


@pytest.mark.parametrize("name", PRESETS)
def test_on_a_cpu_every_preset_runs_serially_and_decode_comes_first(tiny, name):
    config = EngineConfig(policy=name, chunk_tokens=3, kv_cache_mib=1)
    events = []
    with Engine(tiny, config=config, listener=events.append) as engine:
        handles = [engine.submit(item.prompt, item.params, item.id) for item in MIXED]
        outputs = {handle.request.id: [event.token for event in handle] for handle in handles}
        status = engine.status()
    assert outputs == {item.id: alone_on(tiny)(item) for item in MIXED}
    assert status["policy"] == name
    assert status["prefill_decode_overlap_steps"] > 0
    assert status["prefill_decode_stream_overlap_steps"] == 0


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("name", PRESETS)
def test_on_lanes_that_are_late(tiny, name, in_flight):
    bench = late(tiny, policy_named(name), chunk=3, in_flight=in_flight, blocks=24)
    bench.add(*MIXED)
    bench.run()
    assert bench.outputs == {item.id: alone_on(tiny)(item) for item in MIXED}
    assert bench.all_blocks_come_back()
    overlap = bench.scheduler.counters["prefill_decode_overlap_steps"]
    streams = bench.scheduler.counters["prefill_decode_stream_overlap_steps"]
    two_lanes = len(PRESETS[name].placement.lanes) == 2
    assert streams == (overlap if two_lanes else 0)
    assert overlap > 0 or in_flight == 1


def test_unknown_names_and_targets():
    with pytest.raises(SettingError, match="policy 'fast': allowed are serial, dual-stream, "):
        policy_named("fast")
    with pytest.raises(SettingError, match=r"target_ms = 0"):
        policy_named("adaptive", 0)


def decode_tickets(bench: Bench) -> list:
    return bench.scheduler.flight.batches


def read_prompts(bench: Bench) -> None:
    """Until everybody decodes."""
    while bench.scheduler.queues.turns or bench.scheduler.queues.waiting:
        bench.cycle()
        bench.scheduler.lanes[bench.scheduler._policy.placement.prefill].advance()


@pytest.mark.parametrize("policy", [LATE, LATE_FUSED], ids=["two lanes", "fused"])
def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_known(tiny, policy):
    items = [request("a", 5, 8), request("b", 9, 6)]
    bench = late(tiny, policy)
    bench.add(*items)
    read_prompts(bench)
    bench.cycle()
    bench.cycle()
    first, second = decode_tickets(bench)
    assert not first.finished.query()
    before = list(first.work.sequences)
    assert [s.request.id for s in second.work.sequences] == ["a", "b"]
    assert second.work.sources == tuple(before.index(s) if s in before else -1 for s in second.work.sequences)
    assert max(second.work.sources) >= 0
    bench.run()
    assert bench.outputs == {item.id: alone_on(tiny)(item) for item in items}
    # Lengths are known beforehand, so nothing is launched in vain: a token costs one row, and a prompt's first none.
    assert sum(step.tokens for step in bench.steps) == (5 + 7) + (9 + 5)


def test_a_step_that_ran_ahead_of_an_end_token_is_thrown_away(tiny):
    item = request("a", 5, 8)
    tokens = alone_on(tiny)(item)
    end = next(i for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])
    bench = late(tiny, eos=[tokens[end]])
    bench.add(item)
    bench.run()
    assert bench.outputs["a"] == tokens[: end + 1]
    assert bench.scheduler.busy()  # the step after the end token is still out
    assert bench.scheduler.status()["blocks"]["pending"] > 0
    while bench.scheduler.busy():
        bench.cycle()
    assert len(bench.steps) == end + 2
    assert bench.outputs["a"] == tokens[: end + 1]
    assert bench.all_blocks_come_back()


def test_who_draws_tokens_is_never_run_ahead_of(tiny):
    bench = late(tiny)
    bench.add(request("greedy", 5, 8), request("drawn", 5, 8, temperature=1.0))
    read_prompts(bench)
    for _ in range(4):
        bench.cycle()
        assert len(decode_tickets(bench)) <= 1
    bench.run()
    assert bench.outputs["drawn"] == alone_on(tiny)(request("drawn", 5, 8, temperature=1.0))


def test_decode_never_waits_for_a_prompt_that_is_being_read(tiny):
    bench = late(tiny)
    bench.add(request("reader", 4, 6))
    read_prompts(bench)
    bench.add(request("document", 40, 1))
    while not bench.reasons.get("reader"):
        bench.cycle()  # nobody advances the prefill lane
    assert bench.scheduler.lanes["prefill"].done == 1
    assert bench.outputs["reader"] == alone_on(tiny)(request("reader", 4, 6))


def test_the_barrier_waits_for_both(tiny):
    bench = late(tiny, replace(LATE, join=BARRIER))
    bench.add(request("reader", 4, 6))
    bench.cycle()
    bench.add(request("document", 40, 1))
    bench.cycle()
    assert bench.scheduler.lanes["prefill"].done == 2
    assert len(bench.scheduler.flight) == 0


def test_newcomers_join_the_batch_in_flight(tiny):
    bench = late(tiny)
    bench.add(request("old", 4, 12))
    read_prompts(bench)
    bench.cycle()
    bench.add(request("new", 4, 12))
    read_prompts(bench)
    bench.run()
    sizes = [len(step.request_ids) for step in bench.steps if step.phase == "decode"]
    assert max(sizes) == 2
    alone, together = sizes.index(2), sizes.count(2)
    assert sizes == [1] * alone + [2] * together + [1] * (len(sizes) - alone - together)


def test_with_one_piece_of_work_in_flight_the_phases_take_turns(tiny):
    bench = late(tiny, in_flight=1)
    bench.add(request("reader", 4, 30))
    read_prompts(bench)
    bench.add(request("document", 3 * BLOCK, 1))
    for _ in range(40):
        bench.cycle()
    assert "document" in bench.reasons
    assert len(bench.outputs["reader"]) > 5


def test_memory_that_lacks_for_a_step_ahead_is_no_failure(own_tiny, tiny, monkeypatch):
    bench = late(own_tiny)
    lane = bench.scheduler.lanes["decode"]
    launch = lane.launch

    def poor(work, **more):
        if any(row >= 0 for row in work.sources):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return launch(work, **more)

    monkeypatch.setattr(lane, "launch", poor)
    items = [request(i, 3, 6) for i in range(3)]
    bench.add(*items)
    bench.run()
    assert bench.outputs == {item.id: alone_on(tiny)(item) for item in items}


def test_a_fused_step_without_memory_is_tried_phase_by_phase(own_tiny, tiny, monkeypatch):
    bench = late(own_tiny, LATE_FUSED, chunk=2)
    lane = bench.scheduler.lanes["main"]
    launch, mixed = lane.launch, []

    def poor(work, **more):
        if work.phase == "mixed":
            mixed.append(work)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return launch(work, **more)

    monkeypatch.setattr(lane, "launch", poor)
    items = [request(i, 2 + 5 * i, 9) for i in range(3)]
    bench.add(*items)
    bench.run()
    assert mixed
    assert bench.outputs == {item.id: alone_on(tiny)(item) for item in items}
    assert bench.all_blocks_come_back()


def test_a_chunk_is_sized_by_who_decodes(tiny):
    seen = []

    class Watching(Fixed):
        def tokens(self, outlook):
            seen.append(outlook)
            return super().tokens(outlook)

    bench = late(tiny, replace(LATE, sizer=Watching()), chunk=4)
    bench.add(request("reader", 4, 20))
    read_prompts(bench)
    bench.cycle()
    bench.add(request("document", 9, 1))
    bench.run()
    assert seen[0][:2] == (4, 0)
    beside = [outlook for outlook in seen if outlook.decoding]
    assert {outlook.start for outlook in beside} <= {0, 4, 8}
    assert len(beside) >= 2
    assert all(outlook.decoding == 1 and outlook.decode_context >= 4 for outlook in beside)


def test_a_phase_keeps_to_its_part_while_the_other_has_work_and_the_target_allows(tiny):
    launches = []

    class Spy(SimulatedLane):
        def launch(self, work: Work, *, shared: bool = False) -> Ticket:
            launches.append(
                (work.phase, shared, bool(bench.scheduler.flight.chunks), bench.scheduler.queues.decoding > 0)
            )
            return super().launch(work)

    sizer = Adaptive(10.0)
    bench = Bench(tiny, policy=replace(LATE, sizer=sizer), lane=Spy, chunk=4)
    bench.add(request("reader", 4, 40))
    read_prompts(bench)
    bench.add(request("document", 40, 1))
    for _ in range(4):
        bench.cycle()
    for _ in range(2):
        sizer.observe_gap(10.1)
    bench.run()
    chunks = [(shared, decoding) for phase, shared, _, decoding in launches if phase == "prefill"]
    assert chunks[0] == (False, False)
    assert all(shared == decoding for shared, decoding in chunks)
    steps = [(shared, beside) for phase, shared, beside, _ in launches if phase == "decode"]
    assert {True, False} <= {beside for _, beside in steps}
    assert all(beside for shared, beside in steps if shared)
    before = [shared for shared, beside in steps if beside]
    assert before[0]
    assert not before[-1]  # a gap was too long
