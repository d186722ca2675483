"""The closed-loop client: how many at a time, in which order, and what becomes of a failure."""

import dataclasses
import threading
import time

import pytest
import tokenizers
import torch

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import FinishEvent, StepEvent, TokenEvent
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import ContextOverflow, EngineClosed, SettingError
from deepinfer_lab.metrics.latency import summarise
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant.plan import plan_named
from deepinfer_lab.workload.closed_loop import closed_loop, send

CONFIG = EngineConfig(kv_cache_mib=1, chunk_tokens=8)


@pytest.fixture
def model() -> Decoder:
    source = SyntheticSource(dataclasses.replace(SHAPES["tiny"], tied_embeddings=False), "tiny")
    return build_decoder(source, plan_named("none"), group=64, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def tokenizer() -> Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


class CountingEngine:
    """Stands in for an engine. No request ends before `expected` of them have been in flight together."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.in_flight = self.most = 0
        self.changed = threading.Condition()

    def submit(self, prompt, _params, request_id):
        with self.changed:
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            self.changed.notify_all()
        return Answer(self, prompt, request_id)


class Answer:
    def __init__(self, engine: CountingEngine, prompt: list[int], request_id: str) -> None:
        self.engine = engine
        self.request = Request(request_id, tuple(prompt), SamplingParams())
        self.finish = None

    def __iter__(self):
        engine = self.engine
        with engine.changed:
            assert engine.changed.wait_for(lambda: engine.most >= engine.expected, timeout=60), "too few in flight"
        yield TokenEvent(self.request.id, 1, 0.0)
        self.finish = FinishEvent(self.request.id, FinishReason.LENGTH, 0.0)
        with engine.changed:
            engine.in_flight -= 1


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 4), (3, 9), (4, 4), (8, 3)])
def test_as_many_at_a_time_as_asked_for_and_no_more(concurrency, requests):
    engine = CountingEngine(min(concurrency, requests))
    traces = closed_loop(engine, [[1]] * requests, SamplingParams(), concurrency)
    assert engine.most == min(concurrency, requests)
    assert len(traces) == requests


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_on_a_real_engine(model, concurrency):
    events = []
    prompts = [[i] * (1 + i % 5) for i in range(12)]
    with Engine(model, config=CONFIG, listener=events.append) as engine:
        traces = closed_loop(engine, prompts, SamplingParams(max_tokens=6), concurrency, name="load")
    assert [trace.request_id for trace in traces] == [f"load-{i}" for i in range(12)]
    assert [trace.prompt_tokens for trace in traces] == [len(prompt) for prompt in prompts]
    assert all(len(trace.token_times) == 6 and trace.error is None for trace in traces)
    live, most = set(), 0
    for event in events:
        if isinstance(event, StepEvent):
            live |= set(event.request_ids)
            most = max(most, len(live))
        elif isinstance(event, FinishEvent):
            live.discard(event.request_id)
    assert most <= concurrency


def test_times_count_from_the_origin(model):
    with Engine(model, config=CONFIG) as engine:
        before = time.perf_counter()
        (trace,) = closed_loop(engine, [[1, 2]], SamplingParams(max_tokens=4), 1, origin=before - 100)
        after = time.perf_counter()
        (other,) = closed_loop(engine, [[1, 2]], SamplingParams(max_tokens=4), 1)
    assert 100 <= trace.sent < trace.token_times[0]
    assert list(trace.token_times) == sorted(trace.token_times)
    assert trace.token_times[-1] <= after - before + 100
    assert 0 <= other.sent < other.token_times[0] < 60


def test_refusals_become_traces_with_errors(model):
    prompts = [[1, 2], [], [3], [999], [4] * 511]
    with Engine(model, config=CONFIG) as engine:
        traces = closed_loop(engine, prompts, SamplingParams(max_tokens=3), 2)
    assert [trace.error is None for trace in traces] == [True, False, True, False, False]
    assert traces[1].error.startswith("EmptyPrompt: ")
    assert traces[3].error.startswith("InvalidToken: ")
    assert traces[4].error.startswith("ContextOverflow: ")
    assert [trace.prompt_tokens for trace in traces] == [2, 0, 1, 1, 511]
    assert all(trace.token_times == () for trace in (traces[1], traces[3], traces[4]))
    summary = summarise(traces)
    assert (summary.requests, summary.errors) == (2, 3)


def test_text_prompts_are_counted_in_tokens(model, tokenizer):
    with Engine(model, tokenizer, CONFIG) as engine:
        (trace,) = closed_loop(engine, ["naïve"], SamplingParams(max_tokens=2), 1)
    assert trace.prompt_tokens == 6  # bytes, not characters


def test_a_refused_text_prompt_is_counted_in_tokens_too(model, tokenizer):
    with Engine(model, tokenizer, CONFIG) as engine:
        trace = send(engine, "r", "ï" * 300, SamplingParams(max_tokens=2), 0.0)
    assert trace.error.startswith(ContextOverflow.__name__)
    assert trace.prompt_tokens == 600


def test_a_cancelled_request_is_no_success(model):
    """Or it would flatter the throughput and the latency of the run."""

    def listener(event):
        if isinstance(event, TokenEvent) and event.request_id == "request-1":
            engine.cancel("request-1")

    engine = Engine(model, config=CONFIG, listener=listener)
    with engine:
        traces = closed_loop(engine, [[1], [2], [3]], SamplingParams(max_tokens=200), 1)
    assert len(traces[1].token_times) < 200
    assert [trace.error is None for trace in traces] == [True, False, True]


def test_two_loops_one_after_the_other(model):
    with Engine(model, config=CONFIG) as engine:
        for _ in range(2):
            traces = closed_loop(engine, [[1], [2]], SamplingParams(max_tokens=2), 2)
            assert all(trace.error is None for trace in traces)


@pytest.mark.parametrize("concurrency", [0, -3])
def test_concurrency_below_one(concurrency):
    with pytest.raises(SettingError, match=f"concurrency {concurrency}: allowed is 1 or more"):
        closed_loop(None, [[1]], SamplingParams(), concurrency)


def test_no_prompts(model):
    with Engine(model, config=CONFIG) as engine:
        assert closed_loop(engine, [], SamplingParams(), 3) == []


def test_an_engine_that_dies(model, monkeypatch):
    forward, calls = model.forward, iter(range(10_000))

    def fails_later(step, kv):
        if next(calls) > 20:
            raise RuntimeError("out of memory, say")
        return forward(step, kv)

    monkeypatch.setattr(model, "forward", fails_later)
    outcome = []

    def run():
        with Engine(model, config=CONFIG) as engine:
            try:
                closed_loop(engine, [[i] for i in range(30)], SamplingParams(max_tokens=20), 3)
            except EngineClosed as error:
                outcome.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert len(outcome) == 1
    assert "out of memory, say" in outcome[0]
