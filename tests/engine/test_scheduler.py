"""The scheduler, cycle by cycle on the test's own thread, with every block accounted for after each step."""

import pytest
from bench import BLOCK, MIXED, Bench, request
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.engine.event import FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason


@pytest.fixture(scope="module")
def alone(tiny) -> dict[str, list[int]]:
    """Each mixed request's output when it has the engine to itself and its prompt fits one chunk."""
    outputs: dict[str, list[int]] = {}
    for item in MIXED:
        bench = Bench(tiny)
        bench.add(item)
        outputs |= bench.run().outputs
    return outputs


def test_greedy_is_what_whole_prefills_give(greedy, alone):
    for name in ("greedy", "block", "one"):
        (item,) = (r for r in MIXED if r.id == name)
        assert alone[name] == greedy(item.prompt, item.params.max_tokens)


def test_outputs_vary(alone):
    """Or the tests of invariance would prove little."""
    assert all(len(set(tokens)) >= 4 for tokens in alone.values())


@given(
    order=st.permutations(MIXED),
    arrivals=st.lists(st.integers(0, 12), min_size=len(MIXED), max_size=len(MIXED)),
    chunk=st.sampled_from((1, 2, 3, 4, 5, 7, 16, 64)),
    batch=st.integers(1, 8),
    blocks=st.integers(8, 40),
)
@settings(deadline=None, max_examples=20)
def test_tokens_depend_on_nothing_but_the_request(tiny, alone, order, arrivals, chunk, batch, blocks):
    bench = Bench(tiny, blocks=blocks, chunk=chunk, batch=batch)
    for cycle in range(max(arrivals) + 1):
        bench.add(*(item for item, arrival in zip(order, arrivals, strict=True) if arrival == cycle))
        bench.cycle()
    bench.run()
    assert bench.outputs == alone
    assert bench.reasons == {item.id: [FinishReason.LENGTH] for item in MIXED}
    assert bench.all_blocks_come_back()


@given(data=st.data(), chunk=st.sampled_from((1, 3, 8)), batch=st.integers(1, 5), blocks=st.integers(7, 20))
@settings(deadline=None, max_examples=25)
def test_cancelling_at_any_time_disturbs_nobody(tiny, alone, data, chunk, batch, blocks):
    bench, cancelled = Bench(tiny, blocks=blocks, chunk=chunk, batch=batch), set()
    bench.add(*MIXED)
    for _ in range(data.draw(st.integers(0, 25))):
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from([*alone, "nobody"]))
            if any(s.request.id == name for s in bench.scheduler.live()):
                cancelled.add(name)
            bench.cancel(name)
        bench.cycle()
    bench.run()
    assert {name for name, reasons in bench.reasons.items() if reasons == [FinishReason.CANCELLED]} == cancelled
    assert all(len(reasons) == 1 for reasons in bench.reasons.values())
    assert bench.reasons.keys() == alone.keys()
    for name, tokens in alone.items():
        got = bench.outputs.get(name, [])
        assert got == tokens[: len(got)]
        assert name in cancelled or got == tokens
    assert bench.all_blocks_come_back()


def test_nothing_follows_a_terminal_event(tiny):
    bench = Bench(tiny, chunk=3)
    bench.add(*MIXED)
    bench.run()
    ended: set[str] = set()
    for event in bench.events:
        if isinstance(event, FinishEvent):
            ended.add(event.request_id)
        elif isinstance(event, TokenEvent):
            assert event.request_id not in ended
        else:
            assert not ended & set(event.request_ids)


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_one_new_token(tiny, greedy, length, chunk):
    item = request("short", length, 1)
    bench = Bench(tiny, blocks=-(-length // BLOCK), chunk=chunk)
    bench.add(item)
    bench.run()
    assert bench.outputs["short"] == greedy(item.prompt, 1)
    assert {step.phase for step in bench.steps} == {"prefill"}
    assert bench.all_blocks_come_back()


@pytest.mark.parametrize(("length", "new"), [(8, 9), (8, 1), (7, 2), (1, 16), (16, 1), (15, 2), (12, 5)])
def test_a_pool_that_holds_exactly_one_request(tiny, length, new):
    assert (length + new - 1) % BLOCK == 0
    bench = Bench(tiny, blocks=(length + new - 1) // BLOCK, chunk=3)
    bench.add(request("a", length, new), request("b", length, new))
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {"a": new, "b": new}
    assert bench.all_blocks_come_back()


def test_end_of_sequence(tiny, alone):
    tokens = alone["hot"]
    (item,) = (r for r in MIXED if r.id == "hot")
    place = next(i for i in range(2, len(tokens) - 1) if tokens[i] not in tokens[:i])
    bench = Bench(tiny, eos=[tokens[place]])
    bench.add(item)
    bench.run()
    assert bench.outputs["hot"] == tokens[: place + 1]  # the end token itself is reported
    assert bench.reasons["hot"] == [FinishReason.STOP]
    assert bench.all_blocks_come_back()


def test_end_of_sequence_at_once_and_at_the_last_token(tiny, greedy):
    item = request("x", 6, 3)
    tokens = greedy(item.prompt, 3)
    for eos, count in ((tokens[0], 1), (tokens[2], tokens.index(tokens[2]) + 1)):
        bench = Bench(tiny, eos=[eos])
        bench.add(item)
        assert bench.run().outputs["x"] == tokens[:count]
        assert bench.reasons["x"] == [FinishReason.STOP]


def test_ignoring_the_end_of_sequence(tiny, alone):
    (item,) = (r for r in MIXED if r.id == "hot")
    deaf = Request("hot", item.prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True))
    bench = Bench(tiny, eos=set(alone["hot"]))
    bench.add(deaf)
    assert bench.run().outputs == {"hot": alone["hot"]}
    assert bench.reasons["hot"] == [FinishReason.LENGTH]


def test_an_end_token_in_the_prompt_ends_nothing(tiny, greedy):
    item = request("x", 6, 4)
    tokens = greedy(item.prompt, 4)
    eos = next(token for token in item.prompt if token not in tokens)
    bench = Bench(tiny, eos=[eos], chunk=1)
    bench.add(item)
    assert bench.run().outputs["x"] == tokens


def test_first_come_first_served(tiny):
    bench = Bench(tiny, blocks=8, chunk=64)
    bench.add(request("first", 9, 8), request("large", 29, 3), request("small", 2, 2))
    bench.run()  # `large` needs the whole pool and waits for it; `small` would fit at once and must not overtake
    ends = [event.request_id for event in bench.events if isinstance(event, FinishEvent)]
    assert ends == ["first", "large", "small"]
    assert bench.scheduler.queues.preemptions == 0


def test_no_more_than_max_batch_at_a_time(tiny):
    bench = Bench(tiny, batch=3)
    bench.add(*(request(i, 3, 6) for i in range(10)))
    seen = set()
    while bench.scheduler.live():
        bench.cycle()
        seen.add(bench.scheduler.status()["prefilling"] + bench.scheduler.status()["decoding"])
    assert max(seen) == 3


def test_steps_report_what_ran(tiny):
    bench = Bench(tiny, chunk=4)
    bench.add(request("a", 10, 3), request("b", 2, 2))
    bench.run()
    prefill = [(s.request_ids, s.tokens) for s in bench.steps if s.phase == "prefill"]
    assert sorted(prefill) == [(("a",), 2), (("a",), 4), (("a",), 4), (("b",), 2)]
    decode = [s for s in bench.steps if s.phase == "decode"]
    assert sum(s.tokens for s in decode) == 2 + 1  # each request's first token comes from its prefill
    assert all(s.tokens == len(s.request_ids) for s in decode)
    assert all(s.lane == "main" and s.started <= s.finished for s in bench.steps)
    assert [s.cycle for s in bench.steps] == sorted(s.cycle for s in bench.steps)
    times = [event.time for event in bench.events if isinstance(event, TokenEvent)]
    assert times == sorted(times)


def test_decode_goes_on_while_a_long_prompt_is_read(tiny):
    bench = Bench(tiny, chunk=4)
    bench.add(request("reader", 4, 12))
    bench.cycle()
    bench.add(request("newcomer", 40, 1))
    for _ in range(10):
        phases = [event.phase for event in bench.cycle() if isinstance(event, StepEvent)]
        assert phases == ["decode", "prefill"]
    assert bench.scheduler.counters["prefill_decode_overlap_steps"] == 10
    assert bench.scheduler.counters["prefill_decode_stream_overlap_steps"] == 0


def test_prompts_are_read_in_turn(tiny):
    bench = Bench(tiny, chunk=4)
    bench.add(request("a", 12, 1), request("b", 12, 1), request("c", 4, 1))
    bench.run()
    assert [s.request_ids[0] for s in bench.steps] == ["a", "b", "c", "a", "b", "a", "b"]


def test_counters_and_status(tiny):
    bench = Bench(tiny, blocks=10, chunk=4)
    bench.add(request("a", 6, 3), request("b", 6, 3))
    assert bench.scheduler.status() == {
        "policy": "serial", "waiting": 2, "prefilling": 0, "decoding": 0, "in_flight": 0,
        "blocks": {"free": 10, "writing": 0, "readonly": 0, "pending": 0, "cached": 0},
        "prefix_cache": {"queries": 0, "hits": 0, "queried_tokens": 0, "hit_tokens": 0, "evicted_blocks": 0},
        "cycles": 0, "prefill_steps": 0, "decode_steps": 0, "prefill_decode_overlap_steps": 0,
        "prefill_decode_stream_overlap_steps": 0, "preemptions": 0, "finished_requests": 0,
    }  # fmt: skip
    bench.cycle()
    status = bench.scheduler.status()
    assert (status["waiting"], status["prefilling"], status["decoding"]) == (0, 2, 0)
    assert status["blocks"] == {"free": 6, "writing": 3, "readonly": 1, "pending": 0, "cached": 0}
    bench.run()
    status = bench.scheduler.status()
    assert status["prefill_steps"] == sum(s.phase == "prefill" for s in bench.steps) == 4
    assert status["decode_steps"] == sum(s.phase == "decode" for s in bench.steps)
    assert status["finished_requests"] == 2


def test_a_full_block_is_sealed(tiny):
    bench = Bench(tiny, blocks=8, chunk=64)
    bench.add(request("a", 2 * BLOCK, 10))  # 17 tokens at most: 5 blocks, the last three as they are needed
    seen = []
    for _ in range(9):
        bench.cycle()
        blocks = bench.scheduler.status()["blocks"]
        seen.append((blocks["readonly"], blocks["writing"]))
    assert seen == [(2, 0)] + [(2, 1)] * 3 + [(3, 0)] + [(3, 1)] * 3 + [(4, 0)]


def test_cancelling_what_ended_or_never_was(tiny):
    bench = Bench(tiny)
    bench.add(request("a", 3, 2))
    bench.run()
    assert bench.scheduler.cancel("a") == []
    assert bench.scheduler.cancel("nobody") == []
    assert bench.reasons == {"a": [FinishReason.LENGTH]}


def test_cancelling_while_waiting_takes_no_blocks(tiny):
    bench = Bench(tiny, blocks=4)
    bench.add(request("a", 10, 7), request("b", 10, 7))
    bench.cycle()
    assert bench.scheduler.status()["waiting"] == 1
    bench.cancel("b")
    assert bench.run().reasons == {"b": [FinishReason.CANCELLED], "a": [FinishReason.LENGTH]}
    assert "b" not in bench.outputs
    assert bench.all_blocks_come_back()
