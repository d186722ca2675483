"""The engine from its clients' side: threads, handles, text, early ends."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import DuplicateRequest, EmptyPrompt, EngineClosed

SMALL = EngineConfig(kv_cache_mib=1, chunk_tokens=4)
PROMPTS = [[1, 2, 3], list(range(40, 61)), [200], list(range(16))]


def test_completions_in_the_order_of_the_prompts(tiny, greedy, wait_for):
    with Engine(tiny, config=SMALL) as engine:
        before = time.perf_counter()
        done = wait_for(lambda: engine.generate(PROMPTS, SamplingParams(max_tokens=9)))
        after = time.perf_counter()
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert list(completion.tokens) == greedy(prompt, 9)
        assert completion.prompt_tokens == len(prompt)
        assert completion.reason is FinishReason.LENGTH
        assert completion.text == ""
        assert len(completion.token_times) == 9
        assert list(completion.token_times) == sorted(completion.token_times)
        assert before < completion.token_times[0]
        assert completion.token_times[-1] < after
    assert len({completion.request_id for completion in done}) == len(PROMPTS)


def test_nothing_to_generate(tiny, wait_for):
    with Engine(tiny, config=SMALL) as engine:
        assert wait_for(lambda: engine.generate([])) == []


def test_many_clients_at_once(tiny, greedy, wait_for):
    with Engine(tiny, config=EngineConfig(kv_cache_mib=1, chunk_tokens=3, max_batch=5)) as engine:
        params = SamplingParams(max_tokens=6)

        def client(i: int) -> list[int]:
            return list(engine.generate([PROMPTS[i % 4]], params)[0].tokens)

        with ThreadPoolExecutor(8) as pool:
            found = wait_for(lambda: list(pool.map(client, range(24))))
        status = wait_for(engine.status)
    assert found == [greedy(PROMPTS[i % 4], 6) for i in range(24)]
    assert status["finished_requests"] == 24


def test_seeded_sampling_alone_and_in_company(tiny, wait_for):
    hot = SamplingParams(max_tokens=10, temperature=1.0, seed=77)
    with Engine(tiny, config=SMALL) as engine:
        (alone,) = wait_for(lambda: engine.generate([PROMPTS[1]], hot))
        others = [
            engine.submit(p, SamplingParams(max_tokens=20, temperature=1.3, seed=i)) for i, p in enumerate(PROMPTS)
        ]
        (together,) = wait_for(lambda: engine.generate([PROMPTS[1]], hot))
        for other in others:
            wait_for(lambda other=other: engine.collect(other))
        (other_seed,) = wait_for(lambda: engine.generate([PROMPTS[1]], SamplingParams(max_tokens=10, temperature=1.0)))
    assert alone.tokens == together.tokens
    assert alone.tokens != other_seed.tokens


def test_text_in_text_out(tiny, byte_tokenizer, greedy, wait_for):
    tokenizer = byte_tokenizer()
    with Engine(tiny, tokenizer, SMALL) as engine:
        (done,) = wait_for(lambda: engine.generate(["naïve"], SamplingParams(max_tokens=12)))
    assert done.prompt_tokens == 6
    assert list(done.tokens) == greedy(tokenizer.encode("naïve"), 12)
    assert done.text == tokenizer.decode(done.tokens)
    assert done.text


@pytest.mark.parametrize("seed", range(5))
def test_streamed_text_is_the_generated_text(tiny, byte_tokenizer, wait_for, seed):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed)
    with Engine(tiny, byte_tokenizer(), SMALL) as engine:
        pieces = wait_for(lambda: list(engine.stream("hello", params)))
        (done,) = wait_for(lambda: engine.generate(["hello"], params))
    assert "".join(pieces) == done.text
    assert all(pieces)
    assert len(pieces) > 1


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_streamed_text_is_the_generated_text_when_it_ends_early(tiny, byte_tokenizer, wait_for, ignore_eos):
    """The end token here is an ordinary one, as in a model whose tokenizer does not mark it as special."""
    hot = {"max_tokens": 20, "temperature": 1.0, "seed": 3}
    with Engine(tiny, byte_tokenizer(), SMALL) as engine:
        (free,) = wait_for(lambda: engine.generate(["hello"], SamplingParams(**hot)))
    tokenizer = byte_tokenizer()
    place = next(
        i
        for i in range(2, 19)
        if free.tokens[i] not in free.tokens[:i] and tokenizer.decode([free.tokens[i]]) != "\ufffd"
    )
    params = SamplingParams(**hot, ignore_eos=ignore_eos)
    with Engine(tiny, byte_tokenizer([free.tokens[place]]), SMALL) as engine:
        (done,) = wait_for(lambda: engine.generate(["hello"], params))
        pieces = wait_for(lambda: list(engine.stream("hello", params)))
    assert done.reason is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)
    assert done.tokens == (free.tokens if ignore_eos else free.tokens[: place + 1])
    assert "".join(pieces) == done.text


def test_leaving_a_stream_early_cancels(own_model, byte_tokenizer, wait_for, gate):
    events = []
    with Engine(own_model, byte_tokenizer(), EngineConfig(kv_cache_mib=1), events.append) as engine:
        stream = engine.stream("hello", SamplingParams(max_tokens=100, temperature=1.0))
        with ThreadPoolExecutor(1) as pool:
            piece = pool.submit(next, stream)
            gate.arrived()
            while not wait([piece], timeout=0.2).done:  # a token may be no character yet
                gate.step()
        assert piece.result()
        stream.close()
        gate.release()
        wait_for(lambda: engine.generate([[1]], SamplingParams(max_tokens=1)))
    first = next(event for event in events if isinstance(event, FinishEvent))
    assert first.reason is FinishReason.CANCELLED
    assert sum(isinstance(event, TokenEvent) for event in events) < 101


def test_a_refused_prompt_cancels_the_others(own_model, wait_for, gate):
    events = []
    with Engine(own_model, config=EngineConfig(kv_cache_mib=1), listener=events.append) as engine:
        with pytest.raises(EmptyPrompt):
            engine.generate([[1, 2], [], [3]], SamplingParams(max_tokens=100))
        gate.release()
        wait_for(lambda: engine.generate([[1]], SamplingParams(max_tokens=1)))
    ends = [event.reason for event in events if isinstance(event, FinishEvent)]
    assert ends == [FinishReason.CANCELLED, FinishReason.LENGTH]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancel_during_prefill(own_model, wait_for, gate, steps):
    with Engine(own_model, config=SMALL) as engine:
        handle = engine.submit(list(range(16)), SamplingParams(max_tokens=5))
        gate.arrived()
        for _ in range(steps):
            gate.step()
        engine.cancel(handle.request.id)
        gate.release()
        assert wait_for(lambda: engine.collect(handle)).tokens == ()
        assert handle.finish.reason is FinishReason.CANCELLED
        assert wait_for(engine.status)["finished_requests"] == 1


def test_cancel_during_decode(own_model, wait_for, gate):
    with Engine(own_model, config=SMALL) as engine:
        handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=50))
        gate.arrived()
        for _ in range(3):
            gate.step()
        engine.cancel(handle.request.id)
        engine.cancel(handle.request.id)  # twice, for one terminal event
        gate.release()
        done = wait_for(lambda: engine.collect(handle))
        assert len(done.tokens) == 4
        assert done.reason is FinishReason.CANCELLED


def test_cancel_while_waiting(own_model, wait_for, gate):
    events = []
    with Engine(own_model, config=EngineConfig(kv_cache_mib=1, max_batch=1), listener=events.append) as engine:
        running = engine.submit([1, 2], SamplingParams(max_tokens=3), "running")
        gate.arrived()
        waiting = engine.submit([1, 2], SamplingParams(max_tokens=3), "waiting")
        engine.cancel("waiting")
        gate.release()
        assert wait_for(lambda: engine.collect(waiting)).tokens == ()
        assert len(wait_for(lambda: engine.collect(running)).tokens) == 3
    assert not any("waiting" in event.request_ids for event in events if isinstance(event, StepEvent))


def test_cancel_after_the_end_and_of_strangers(tiny, wait_for):
    events = []
    with Engine(tiny, config=SMALL, listener=events.append) as engine:
        handle = engine.submit([1], SamplingParams(max_tokens=2), "a")
        assert wait_for(lambda: engine.collect(handle)).reason is FinishReason.LENGTH
        engine.cancel("a")
        engine.cancel("nobody")
        engine.cancel_all()
        assert wait_for(engine.status)["finished_requests"] == 1
    assert [event.request_id for event in events if isinstance(event, FinishEvent)] == ["a"]


def test_cancel_all(own_model, wait_for, gate):
    with Engine(own_model, config=EngineConfig(kv_cache_mib=1, max_batch=2)) as engine:
        handles = [engine.submit([1, 2], SamplingParams(max_tokens=50)) for _ in range(5)]
        gate.arrived()
        engine.cancel_all()
        gate.release()
        done = [wait_for(lambda h=handle: engine.collect(h)) for handle in handles]
        assert {completion.reason for completion in done} == {FinishReason.CANCELLED}
        blocks = wait_for(engine.status)["blocks"]
    assert blocks["writing"] == blocks["readonly"] == 0


def test_an_idle_engine_has_all_its_blocks_back(own_model, wait_for):
    with Engine(own_model, config=EngineConfig(kv_cache_mib=1)) as engine:
        wait_for(lambda: engine.generate([[1] * 20] * 3, SamplingParams(max_tokens=5)))
        blocks = wait_for(engine.status)["blocks"]
    assert blocks == {"free": 7, "writing": 0, "readonly": 0, "pending": 0, "cached": 1}  # 24 tokens fill one of 16


def test_fifty_requests_into_a_pool_that_holds_two(own_model, wait_for):
    events = []
    config = EngineConfig(kv_cache_mib=1, chunk_tokens=64)
    with Engine(own_model, config=config, listener=events.append) as engine:
        prompts = [[i % 256] * 50 for i in range(50)]  # 50 + 4 - 1 tokens are 4 of 8 blocks
        done = wait_for(lambda: engine.generate(prompts, SamplingParams(max_tokens=4)))
    assert [len(completion.tokens) for completion in done] == [4] * 50
    assert max(len(event.request_ids) for event in events if isinstance(event, StepEvent)) <= 2
    ends = [event.request_id for event in events if isinstance(event, FinishEvent)]
    assert sorted(ends) == sorted(completion.request_id for completion in done)


def test_names_of_live_requests_are_taken(own_model, wait_for, gate):
    with Engine(own_model, config=SMALL) as engine:
        first = engine.submit([1], SamplingParams(max_tokens=2), "same")
        with pytest.raises(DuplicateRequest, match="'same'"):
            engine.submit([2], SamplingParams(max_tokens=2), "same")
        gate.arrived()
        gate.release()
        wait_for(lambda: engine.collect(first))
        again = engine.submit([2], SamplingParams(max_tokens=2), "same")  # free once the first has ended
        assert len(wait_for(lambda: engine.collect(again)).tokens) == 2


def test_a_name_that_is_made_up_is_nobodys(own_model, wait_for, gate):
    """A client may well call its requests request-0, request-1 ...; `closed_loop` does."""
    with Engine(own_model, config=SMALL) as engine:
        named = [engine.submit([1], SamplingParams(max_tokens=2), f"request-{i}") for i in range(3)]
        gate.arrived()
        try:
            unnamed = engine.submit([1], SamplingParams(max_tokens=2))
        finally:
            gate.release()
        for handle in (*named, unnamed):
            assert len(wait_for(lambda h=handle: engine.collect(h)).tokens) == 2


def test_the_listener_sees_everything_in_order(tiny, wait_for):
    events, threads = [], set()

    def listener(event):
        events.append(event)
        threads.add(threading.current_thread().name)

    with Engine(tiny, config=SMALL, listener=listener) as engine:
        handle = engine.submit(list(range(10)), SamplingParams(max_tokens=3), "a")
        done = wait_for(lambda: engine.collect(handle))
    assert threads == {"deepinfer-engine"}
    kinds = [event.phase if isinstance(event, StepEvent) else type(event).__name__ for event in events]
    assert kinds == ["prefill"] * 3 + ["TokenEvent"] + ["decode", "TokenEvent"] * 2 + ["FinishEvent"]
    assert tuple(event.token for event in events if isinstance(event, TokenEvent)) == done.tokens
    assert events[-1] == handle.finish


def test_status_names_what_there_is(tiny, wait_for):
    with Engine(tiny, config=SMALL) as engine:
        status = wait_for(engine.status)
    assert status["policy"] == "serial"
    assert status["kv_bytes"] == 1 << 20
    assert status["blocks"]["free"] == 128  # 512 bytes a token, 16 tokens a block


def test_closed(tiny, wait_for):
    engine = Engine(tiny, config=SMALL)
    wait_for(engine.close)
    wait_for(engine.close)
    engine.cancel("nobody")
    engine.cancel_all()
    for call in (lambda: engine.submit([1]), engine.status, lambda: engine.generate([[1]])):
        with pytest.raises(EngineClosed, match="closed"):
            wait_for(call)


def test_closing_ends_whatever_is_live(own_model, wait_for, gate):
    events, started = [], time.perf_counter()
    engine = Engine(own_model, config=EngineConfig(kv_cache_mib=1, chunk_tokens=4, max_batch=2), listener=events.append)
    handles = [engine.submit([1] * 6, SamplingParams(max_tokens=50), name) for name in ("a", "b", "c")]
    gate.arrived()
    for _ in range(3):
        gate.step()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.release()
    done = [wait_for(lambda h=handle: engine.collect(h)) for handle in handles]
    wait_for(closing.join)
    assert {completion.reason for completion in done} == {FinishReason.CANCELLED}
    assert not any(handle.finish.error for handle in handles)
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert sorted(event.request_id for event in ends) == ["a", "b", "c"]  # the listener is told, too
    assert all(started < event.time < time.perf_counter() for event in ends)


def test_closing_gives_terminal_events_a_time(own_model, wait_for, gate):
    """`Event.time` is perf_counter seconds, of this kind of event as well."""
    engine = Engine(own_model, config=SMALL)
    started = time.perf_counter()
    handle = engine.submit([1] * 6, SamplingParams(max_tokens=50))
    gate.arrived()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.release()
    wait_for(lambda: engine.collect(handle))
    wait_for(closing.join)
    assert started < handle.finish.time < time.perf_counter()


def test_leaving_the_context_closes(tiny, wait_for):
    with Engine(tiny, config=SMALL) as engine:
        handle = engine.submit([1], SamplingParams(max_tokens=511))
    assert wait_for(lambda: engine.collect(handle)).reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    with pytest.raises(EngineClosed):
        engine.submit([1])
