"""An engine whose thread dies takes nobody with it: every client is told, and nothing hangs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import FinishEvent
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import EngineClosed

CONFIG = EngineConfig(kv_cache_mib=1, chunk_tokens=4, max_batch=2)
FAILURE = RuntimeError("out of memory, say")


def test_every_waiting_client_is_told(own_model, wait_for, gate):
    engine = Engine(own_model, config=CONFIG)
    handles = [engine.submit([1] * 6, SamplingParams(max_tokens=50)) for _ in range(5)]
    gate.arrived()
    for _ in range(2):
        gate.step()
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(engine.collect, handle) for handle in handles]
        gate.break_down(FAILURE)
        for future in waiting:
            with pytest.raises(EngineClosed, match="out of memory, say"):
                wait_for(future.result)
    assert {handle.finish.reason for handle in handles} == {FinishReason.ERROR}
    wait_for(engine.close)


def test_tokens_that_came_before_are_not_lost(own_model, wait_for, gate):
    engine = Engine(own_model, config=CONFIG)
    handle = engine.submit([1, 2], SamplingParams(max_tokens=50))
    gate.arrived()
    gate.step()
    gate.step()
    gate.break_down(FAILURE)
    tokens = []

    def read():
        for event in handle:
            tokens.append(event.token)

    with pytest.raises(EngineClosed):
        wait_for(read)
    assert len(tokens) == 2


def test_collecting_twice_does_not_turn_a_failure_into_success(own_model, wait_for, gate):
    engine = Engine(own_model, config=CONFIG)
    handle = engine.submit([1, 2], SamplingParams(max_tokens=50))
    gate.arrived()
    gate.break_down(FAILURE)
    with pytest.raises(EngineClosed):
        wait_for(lambda: engine.collect(handle))
    with pytest.raises(EngineClosed):
        wait_for(lambda: engine.collect(handle))


def test_status_asked_before_the_death_does_not_hang(own_model, wait_for, gate):
    engine = Engine(own_model, config=CONFIG)
    engine.submit([1, 2], SamplingParams(max_tokens=50))
    gate.arrived()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.status)
        gate.break_down(FAILURE)
        with pytest.raises(EngineClosed, match="out of memory, say"):
            wait_for(asked.result)


def test_everything_afterwards_says_that_it_died(own_model, wait_for, gate):
    engine = Engine(own_model, config=CONFIG)
    handle = engine.submit([1, 2], SamplingParams(max_tokens=50))
    gate.arrived()
    gate.break_down(FAILURE)
    with pytest.raises(EngineClosed):
        wait_for(lambda: engine.collect(handle))
    for call in (engine.status, lambda: engine.submit([1]), lambda: engine.generate([[1]])):
        with pytest.raises(EngineClosed, match=r"died: .*out of memory, say"):
            wait_for(call)
    wait_for(engine.close)


def test_a_stream_raises(own_model, byte_tokenizer, wait_for, gate):
    engine = Engine(own_model, byte_tokenizer(), CONFIG)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: list(engine.stream("hi", SamplingParams(max_tokens=50))))
        gate.arrived()
        gate.break_down(FAILURE)
        with pytest.raises(EngineClosed):
            wait_for(reading.result)


def test_the_listener_gets_terminal_events(own_model, wait_for, gate):
    events = []
    engine = Engine(own_model, config=CONFIG, listener=events.append)
    handles = [engine.submit([1, 2], SamplingParams(max_tokens=50), name) for name in ("a", "b", "c")]
    gate.arrived()
    gate.break_down(FAILURE)
    for handle in handles:
        with pytest.raises(EngineClosed):
            wait_for(lambda h=handle: engine.collect(h))
    wait_for(engine.close)
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert sorted(event.request_id for event in ends) == ["a", "b", "c"]


def test_a_listener_that_raises_ends_the_engine_and_nothing_hangs(tiny, wait_for):
    def listener(_event):
        raise ValueError("a bad listener")

    engine = Engine(tiny, config=CONFIG, listener=listener)
    handle = engine.submit([1, 2], SamplingParams(max_tokens=50))
    with pytest.raises(EngineClosed, match="a bad listener"):
        wait_for(lambda: engine.collect(handle))
    wait_for(engine.close)


def test_submitting_while_it_dies(own_model, wait_for, gate):
    """Whichever comes first, a client is refused or told; none waits for an engine that is gone."""
    engine = Engine(own_model, config=CONFIG)
    engine.submit([1, 2], SamplingParams(max_tokens=50))
    gate.arrived()
    ready = threading.Barrier(9)

    def client() -> str:
        ready.wait()
        try:
            engine.collect(engine.submit([1], SamplingParams(max_tokens=50)))
        except EngineClosed:
            return "told"
        return "served"

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(client) for _ in range(8)]
        ready.wait()
        gate.break_down(FAILURE)
        assert [wait_for(future.result) for future in futures] == ["told"] * 8


def test_one_bad_request_does_not_end_the_others(tiny, wait_for):
    """Low temperatures are allowed, so they must not take the engine down."""
    with Engine(tiny, config=CONFIG) as engine:
        good = engine.submit([1, 2], SamplingParams(max_tokens=30))
        cold = engine.submit([1, 2], SamplingParams(max_tokens=5, temperature=1e-45))
        assert len(wait_for(lambda: engine.collect(good)).tokens) == 30
        assert len(wait_for(lambda: engine.collect(cold)).tokens) == 5
