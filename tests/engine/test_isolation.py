"""One request's misfortune is its own."""

import weakref
from collections.abc import Sequence

import pytest
import torch
from bench import BLOCK, Bench, alone_on, request

from deepinfer_lab.engine import work
from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import StepEvent
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.simulated_lane import LATE, SimulatedLane
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import NonFiniteLogits, OutOfDeviceMemory
from deepinfer_lab.model.decoder import Decoder

GOOD = [request("good", 9, 8), request("better", 3, 8, temperature=1.0, seed=3)]


def short_of_memory(model: Decoder, monkeypatch: pytest.MonkeyPatch, *, tokens: int) -> list[int]:
    """Let the model fail, as a GPU does, where a step has more than so many tokens. The list fills with their numbers."""
    forward, refused = model.forward, []

    def limited(step, kv):
        if len(step.token_ids) > tokens:
            refused.append(len(step.token_ids))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return forward(step, kv)

    monkeypatch.setattr(model, "forward", limited)
    return refused


def test_a_prompt_that_does_not_fit_the_device_fails_alone(own_tiny, tiny, monkeypatch):
    short_of_memory(own_tiny, monkeypatch, tokens=10)
    bench = Bench(own_tiny)
    bench.add(request("huge", 11, 4), *GOOD)
    bench.run()
    assert bench.reasons["huge"] == [FinishReason.ERROR]
    assert isinstance(bench.errors["huge"], OutOfDeviceMemory)
    assert "request huge: prefill of 11 tokens: CUDA out of memory" in str(bench.errors["huge"])
    assert {item.id: bench.outputs[item.id] for item in GOOD} == {item.id: alone_on(tiny)(item) for item in GOOD}
    assert bench.all_blocks_come_back()


def test_a_batch_that_does_not_fit_is_halved(own_tiny, tiny, monkeypatch):
    refused = short_of_memory(own_tiny, monkeypatch, tokens=2)
    items = [request(i, 2, 6) for i in range(5)]
    bench = Bench(own_tiny, chunk=2)
    bench.add(*items)
    bench.run()
    assert 5 in refused
    assert bench.outputs == {item.id: alone_on(tiny)(item) for item in items}


def test_a_retry_finds_the_memory_of_the_failed_pass_free(own_tiny, monkeypatch):
    forward, failed, alive = own_tiny.forward, [], []

    def limited(step, kv):
        alive.extend(tensor() is not None for tensor in failed)
        if len(step.token_ids) > 2:
            activations = torch.zeros(1000)
            failed.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(step, kv)

    monkeypatch.setattr(own_tiny, "forward", limited)
    bench = Bench(own_tiny, chunk=2)
    bench.add(*(request(i, 2, 4) for i in range(5)))
    bench.run()
    assert failed
    assert not any(alive)


def test_a_failed_launch_may_have_left_work_behind(tiny, monkeypatch):
    """Layers that were enqueued before memory ran out still write: the blocks wait for them."""
    bench = Bench(tiny, policy=LATE, lane=SimulatedLane, prefix_cache=False)
    lane = bench.scheduler.lanes["prefill"]
    launch = lane.launch

    def halfway(work, **more):
        launch(work, **more)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(lane, "launch", halfway)
    bench.add(request("huge", 3 * BLOCK, 4))
    bench.cycle()
    assert isinstance(bench.errors["huge"], OutOfDeviceMemory)
    assert bench.scheduler.status()["blocks"]["pending"] == 3
    lane.advance()
    assert bench.all_blocks_come_back()


def test_halves_are_not_more_work_in_flight_than_allowed(own_tiny, tiny, monkeypatch):
    bench = Bench(own_tiny, policy=LATE, lane=SimulatedLane, in_flight=2)
    items = [request(i, 2, 5) for i in range(6)]
    decode = bench.scheduler.lanes["decode"]
    launch, most = decode.launch, []

    def limited(work, **more):
        if len(work.sequences) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        ticket = launch(work)
        most.append(len(bench.scheduler.flight) + 1)
        return ticket

    monkeypatch.setattr(decode, "launch", limited)
    bench.add(*items)
    bench.run()
    assert max(most) == 2
    assert bench.outputs == {item.id: alone_on(tiny)(item) for item in items}


def test_memory_may_lack_for_choosing_tokens(tiny, monkeypatch):
    choose = work.choose_greedily
    items = [request(i, 2, 5) for i in range(3)]
    expected = {item.id: alone_on(tiny)(item) for item in items}

    def limited(logits):
        if len(logits) > 1 or limited.poor:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return choose(logits)

    limited.poor = False
    monkeypatch.setattr(work, "choose_greedily", limited)
    bench = Bench(tiny)
    bench.add(*items)
    for _ in range(4):
        bench.cycle()
    assert max(len(step.request_ids) for step in bench.steps) == 3
    limited.poor = True
    bench.cycle()
    assert {type(error) for error in bench.errors.values()} == {OutOfDeviceMemory}
    assert "choosing a token: CUDA out of memory" in str(bench.errors["0"])
    assert all(tokens == expected[name][: len(tokens)] for name, tokens in bench.outputs.items())
    assert bench.all_blocks_come_back()


def test_work_whose_requests_are_all_gone_is_still_committed(tiny):
    bench = Bench(tiny, policy=LATE, lane=SimulatedLane)
    bench.add(request("gone", 5, 4))
    bench.cycle()
    bench.cancel("gone")
    assert (bench.scheduler.live(), bench.scheduler.busy()) == ([], True)
    bench.cycle()
    assert not bench.scheduler.busy()
    assert bench.all_blocks_come_back()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_logits_that_are_not_finite(own_tiny, tiny, prefix_cache):
    own_tiny.embed.weight[255] = float("nan")
    bench = Bench(own_tiny, prefix_cache=prefix_cache)
    bench.add(Request("bad", (255,) * (2 * BLOCK + 1), SamplingParams(max_tokens=9)), *GOOD)
    bench.run()
    assert bench.reasons["bad"] == [FinishReason.ERROR]
    assert isinstance(bench.errors["bad"], NonFiniteLogits)
    assert "bad" not in bench.outputs
    assert {item.id: bench.outputs[item.id] for item in GOOD} == {item.id: alone_on(tiny)(item) for item in GOOD}
    assert bench.all_blocks_come_back()


@pytest.mark.parametrize("live", [False, True])
def test_what_an_overflow_leaves_in_its_blocks_harms_nobody(own_tiny, tiny, live):
    """To mask NaN is not enough where a weight of 0 still meets it: 0 * NaN is NaN."""
    own_tiny.embed.weight[255] = float("nan")
    bad = Request("bad", (255,) * 9, SamplingParams(max_tokens=2))
    good = [
        Request("short", (1, 2, 3), SamplingParams(max_tokens=5)),
        Request("long", (7,) * 18, SamplingParams(max_tokens=9)),
    ]
    bench = Bench(own_tiny, blocks=24, prefix_cache=False, chunk=4 if live else 64)
    bench.add(bad)
    if not live:
        bench.run()
        allocator = bench.scheduler.memory.allocator
        held = allocator.allocate(21)  # so that what comes next gets the blocks that `bad` had
        allocator.release(held, [])
        allocator.reclaim()
    bench.add(*good)
    bench.run()
    assert {item.id: bench.outputs[item.id] for item in good} == {item.id: alone_on(tiny)(item) for item in good}


def test_the_engine_goes_on(own_model, wait_for):
    own_model.embed.weight[255] = float("nan")
    with Engine(own_model, config=EngineConfig(kv_cache_mib=1)) as engine:
        bad = engine.submit([255, 1], SamplingParams(max_tokens=3))
        good = engine.submit([1, 2], SamplingParams(max_tokens=3))
        with pytest.raises(NonFiniteLogits, match=f"request {bad.request.id}: logits after 2 tokens"):
            wait_for(lambda: list(bad))
        assert len(wait_for(lambda: list(good))) == 3
        assert len(wait_for(lambda: engine.generate([[3]], SamplingParams(max_tokens=2)))[0].tokens) == 2


def test_cancelled_between_two_chunks(tiny):
    bench = Bench(tiny, chunk=4)
    bench.add(request("gone", 15, 4), *GOOD)
    bench.cycle()
    assert chunks(bench.events, "gone") == [4]
    bench.cancel("gone")
    bench.run()
    assert chunks(bench.events, "gone") == [4]
    assert bench.reasons["gone"] == [FinishReason.CANCELLED]
    assert {item.id: bench.outputs[item.id] for item in GOOD} == {item.id: alone_on(tiny)(item) for item in GOOD}
    assert bench.all_blocks_come_back()


def chunks(events: Sequence[object], name: str) -> list[int]:
    return [e.tokens for e in events if isinstance(e, StepEvent) and e.phase == "prefill" and e.request_ids == (name,)]
