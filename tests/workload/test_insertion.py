"""The insertion of a document: which gaps belong to it, in which order things happen, and what may go wrong."""

import dataclasses
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import FinishEvent, TokenEvent
from deepinfer_lab.engine.handle import RequestHandle
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import ContextOverflow, EngineClosed, NonFiniteLogits, RequestFailed, SettingError
from deepinfer_lab.metrics.latency import RequestTrace
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named
from deepinfer_lab.workload.insertion import Insertion, insert_document


def insertion(*readers, sent, tokens, prompt=100):
    traces = [RequestTrace(f"reader-{i}", 1, 0.0, tuple(times)) for i, times in enumerate(readers)]
    return Insertion(tuple(traces), RequestTrace("document", prompt, sent, tuple(tokens)))


def test_gaps_by_hand():
    """Sent at 2.5, first token at 5.5: the gaps 2-3, 3-5 and 5-6 overlap that; 1-2 and 6-7 do not."""
    found = insertion([1, 2, 3, 5, 6, 7], sent=2.5, tokens=[5.5, 6])
    assert found.window == (2.5, 5.5)
    assert found.ttft == 3
    assert found.disturbed_itl == [1, 2, 1]
    assert found.steady_itl == [1, 1]
    assert found.tokens_per_s == (100 + 1 + 2) / 3  # readers received theirs at 3 and 5


@pytest.mark.parametrize("first_token", [8.9, 9.0, 9.1])
def test_the_gap_that_holds_the_whole_prompt_is_disturbed_on_whichever_side_it_ends(first_token):
    """One step reads all of the prompt; readers' next tokens arrive with the document's first one."""
    found = insertion([1, 2, 9, 10], sent=2.1, tokens=[first_token])
    assert 7 in found.disturbed_itl
    assert 7 not in found.steady_itl


def test_the_start_is_not_steady():
    """The first reader's second token waits for the second reader's prompt."""
    found = insertion([1, 5, 6, 7], [5, 6, 7], sent=8, tokens=[9])
    assert found.steady_itl == [1, 1, 1, 1]


@given(
    readers=st.lists(
        st.lists(st.integers(0, 60), min_size=1, max_size=15, unique=True).map(sorted), min_size=1, max_size=4
    ),
    sent=st.integers(0, 60),
    ttft=st.integers(1, 30),
)
def test_every_gap_is_counted_once_and_where_it_belongs(readers, sent, ttft):
    found = insertion(*readers, sent=sent, tokens=[sent + ttft])
    decoding = max(times[0] for times in readers)
    halves = range(2 * sent + 1, 2 * (sent + ttft), 2)  # one point in each unit of the window, doubled
    gaps = [gap for times in readers for gap in pairwise(times)]
    disturbed = [any(2 * a < at < 2 * b for at in halves) for a, b in gaps]
    assert found.disturbed_itl == [b - a for (a, b), hit in zip(gaps, disturbed, strict=True) if hit]
    assert found.steady_itl == [b - a for (a, b), hit in zip(gaps, disturbed, strict=True) if not hit and a >= decoding]


@pytest.fixture
def real_engine():
    source = SyntheticSource(dataclasses.replace(SHAPES["tiny"], tied_embeddings=False), "tiny")
    model = build_decoder(source, plan_named("none"), group=64, device=torch.device("cpu"), dtype=torch.float32)
    with Engine(model, config=EngineConfig(kv_cache_mib=4, chunk_tokens=8, max_batch=8)) as engine:
        yield engine


def test_on_a_real_engine(real_engine):
    found = insert_document(
        real_engine, [[1], [2, 3], [4]], [5] * 100, reader_tokens=480, document_tokens=3, settle_tokens=5
    )
    sent, first = found.window
    assert [trace.request_id for trace in found.readers] == [f"insertion-reader-{i}" for i in range(3)]
    assert [trace.prompt_tokens for trace in found.readers] == [1, 2, 1]
    assert found.document.prompt_tokens == 100
    assert len(found.document.token_times) == 3
    for reader in found.readers:
        assert reader.error is None
        assert sum(at <= sent for at in reader.token_times) >= 5
        assert sum(at > first for at in reader.token_times) >= 5
    assert found.disturbed_itl
    assert found.steady_itl
    assert found.tokens_per_s > 101 / found.ttft - 1e-6
    assert real_engine.status()["decoding"] == 0  # nothing is left behind


def test_twice_on_one_engine(real_engine):
    for _ in range(2):
        insert_document(real_engine, [[1]], [5] * 20, reader_tokens=400, settle_tokens=2)


def test_a_document_that_is_refused_leaves_no_reader_behind(real_engine):
    with pytest.raises(ContextOverflow):
        insert_document(real_engine, [[1], [2]], [5] * 600, reader_tokens=500, settle_tokens=1)
    assert real_engine.status()["decoding"] == 0


class ScriptedEngine:
    """`play(engine, handle)` runs on a thread for each request; it puts tokens, and ends the request or leaves it."""

    tokenizer = None
    config = SimpleNamespace(max_batch=4)

    def __init__(self, play, on_document=lambda engine: None) -> None:
        self.play, self.on_document = play, on_document
        self.handles: dict[str, RequestHandle] = {}
        self.put: dict[str, int] = {}
        self.ended: set[str] = set()
        self.document_sent = threading.Event()

    def submit(self, prompt, params, request_id):
        if request_id == "insertion-document":
            self.on_document(self)
            self.document_sent.set()
        handle = self.handles[request_id] = RequestHandle(Request(request_id, tuple(prompt), params))
        self.put[request_id] = 0
        threading.Thread(target=self.play, args=(self, handle), daemon=True).start()
        return handle

    def tokens(self, handle, count):
        for _ in range(count):
            self.put[handle.request.id] += 1
            handle.put(TokenEvent(handle.request.id, 1, 0.0))

    def end(self, handle, reason, error=None):
        if handle.request.id not in self.ended:
            self.ended.add(handle.request.id)
            handle.put(FinishEvent(handle.request.id, reason, 0.0, error))

    def cancel(self, request_id):
        self.end(self.handles[request_id], FinishReason.CANCELLED)

    def cancel_all(self):
        for request_id in list(self.handles):
            self.cancel(request_id)


def is_document(handle):
    return handle.request.id == "insertion-document"


def document_at_once(engine, handle):
    engine.tokens(handle, 1)
    engine.end(handle, FinishReason.LENGTH)


def run(engine, **options):
    return insert_document(engine, [[1], [2]], [3] * 9, **{"reader_tokens": 100, "settle_tokens": 4, **options})


def test_the_document_waits_for_the_slowest_reader_and_the_end_for_the_slowest_after_it():
    put_at_send = []
    slow_may_go_on, slow_may_finish = threading.Event(), threading.Event()

    def play(engine, handle):
        if is_document(handle):
            document_at_once(engine, handle)
            slow_may_finish.wait(60)
            return
        slow = handle.request.id.endswith("1")
        if slow:
            engine.tokens(handle, 3)
            slow_may_go_on.wait(60)  # until the other one is far ahead
            engine.tokens(handle, 1)
        else:
            engine.tokens(handle, 40)
            slow_may_go_on.set()
        engine.document_sent.wait(60)
        while handle.request.id not in engine.ended:  # as an engine does: on and on, until it is cancelled
            engine.tokens(handle, 1)
            slow_may_finish.wait(0.001)

    engine = ScriptedEngine(play, lambda engine: put_at_send.append(dict(engine.put)))
    found = run(engine, reader_tokens=10**6)
    slow_may_finish.set()
    assert put_at_send == [{"insertion-reader-0": 40, "insertion-reader-1": 4}]
    first = found.window[1]
    assert all(sum(at >= first for at in trace.token_times) >= 4 for trace in found.readers)
    assert [trace.error for trace in found.readers] == [None, None]


def test_readers_that_run_out_of_tokens_before_the_document_is_read():
    def play(engine, handle):
        if is_document(handle):
            engine.handles["insertion-reader-0"].put(FinishEvent("insertion-reader-0", FinishReason.LENGTH, 0.0))
            document_at_once(engine, handle)
        else:
            engine.tokens(handle, 9)

    with pytest.raises(SettingError, match="reader_tokens 9: insertion-reader-0 had received them all"):
        run(ScriptedEngine(play), reader_tokens=9)


def test_readers_that_run_out_on_a_real_engine(real_engine):
    with pytest.raises(SettingError, match="reader_tokens 7: insertion-reader-0 had received them all"):
        insert_document(real_engine, [[1]], [5] * 400, reader_tokens=7, settle_tokens=3)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [NonFiniteLogits("NaN"), EngineClosed("the engine died")])
def test_a_reader_that_fails(when, error):
    def play(engine, handle):
        if is_document(handle):
            return document_at_once(engine, handle)
        engine.tokens(handle, 4 if when == "after" else 2)
        if when == "after":
            engine.document_sent.wait(60)
        return engine.end(handle, FinishReason.ERROR, error)

    with pytest.raises(type(error)):
        run(ScriptedEngine(play))


def test_a_document_that_fails():
    def play(engine, handle):
        if is_document(handle):
            engine.end(handle, FinishReason.ERROR, NonFiniteLogits("NaN"))
        else:
            engine.tokens(handle, 4)

    engine = ScriptedEngine(play)
    with pytest.raises(NonFiniteLogits):
        run(engine)
    assert len(engine.ended) == 3


@pytest.mark.parametrize("victim", ["insertion-reader-1", "insertion-document"])
def test_a_request_that_somebody_else_cancels(victim):
    """A run whose load went away measured nothing."""

    def play(engine, handle):
        if not is_document(handle):
            engine.tokens(handle, 4)
        elif victim == "insertion-document":
            engine.end(handle, FinishReason.CANCELLED)
        else:
            engine.cancel(victim)
            document_at_once(engine, handle)

    with pytest.raises(RequestFailed, match=f"request {victim} was cancelled from elsewhere after"):
        run(ScriptedEngine(play))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"readers": []}, "0 readers: allowed are 1 to 3"),
        ({"readers": [[1]] * 4}, "4 readers: allowed are 1 to 3, the engine's max_batch less the document"),
        ({"settle_tokens": 0}, "settle_tokens 0: allowed is 1 or more"),
        ({"reader_tokens": 8, "settle_tokens": 4}, r"reader_tokens 8: allowed is 9 \(2 settle_tokens \+ 1\) or more"),
    ],
)
def test_settings_that_are_not_allowed(options, message):
    asked = {"readers": [[1]], "document": [2], "reader_tokens": 100, **options}
    engine = ScriptedEngine(None)
    with pytest.raises(SettingError, match=message):
        insert_document(engine, **asked)
    assert not engine.handles
