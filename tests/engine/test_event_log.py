"""Every event on disk, and metrics for whoever asks often."""

import json

import pytest

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.event import FinishEvent, TokenEvent
from deepinfer_lab.engine.event_log import EventLog
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import NonFiniteLogits, SettingError


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_log_holds_what_the_listener_hears(own_model, tmp_path, wait_for):
    path, heard = tmp_path / "events.jsonl", []
    own_model.embed.weight[255] = float("nan")
    config = EngineConfig(kv_cache_mib=1, event_log=path)
    with Engine(own_model, config=config, listener=heard.append) as engine:
        wait_for(lambda: engine.generate([[1, 2], [3]], SamplingParams(max_tokens=3, logprobs=1)))
        with pytest.raises(NonFiniteLogits):
            wait_for(lambda: engine.generate([[255]]))
    *logged, end = lines(path)
    assert end == {"type": "end", "dropped": 0}
    assert [line["type"] for line in logged] == [type(event).__name__ for event in heard]
    tokens = [line for line in logged if line["type"] == "TokenEvent"]
    assert [(t["request_id"], t["token"], t["logprob"]) for t in tokens] == [
        (e.request_id, e.token, e.logprob) for e in heard if isinstance(e, TokenEvent)
    ]
    ends = [line for line in logged if line["type"] == "FinishEvent"]
    assert sorted(line["reason"] for line in ends) == ["error", "length", "length"]
    assert "NonFiniteLogits" in next(line["error"] for line in ends if line["reason"] == "error")


def test_a_full_buffer_drops_the_oldest_and_says_how_many(tmp_path):
    log = EventLog(tmp_path / "log", capacity=3, flush_s=3600)
    for token in range(10):
        log.add(TokenEvent("a", token, 0.0))
    log.close()
    *logged, end = lines(tmp_path / "log")
    assert [line["token"] for line in logged] == [7, 8, 9]
    assert end == {"type": "end", "dropped": 7}


def test_a_place_that_cannot_be_written(own_model, tmp_path):
    config = EngineConfig(kv_cache_mib=1, event_log=tmp_path / "no" / "log")
    with pytest.raises(SettingError, match=r"event_log = .*no/log': cannot be written \(No such file"):
        Engine(own_model, config=config)


def test_metrics_are_those_of_a_moment_ago(own_model, wait_for):
    with Engine(own_model, config=EngineConfig(kv_cache_mib=1)) as engine:
        assert engine.metrics()["finished_requests"] == 0
        wait_for(lambda: engine.generate([[1]] * 3, SamplingParams(max_tokens=2)))
        status = wait_for(engine.status)  # answered after the engine's thread fell idle, or by its last cycle
        assert status["finished_requests"] == 3
    found = engine.metrics()
    assert found["finished_requests"] == 3
    assert found.keys() == status.keys()


def test_a_listener_that_fails_ends_no_request_twice(own_model, tmp_path, wait_for):
    path = tmp_path / "log"

    def listener(event):
        if isinstance(event, FinishEvent):
            raise RuntimeError("broken listener")

    engine = Engine(own_model, config=EngineConfig(kv_cache_mib=1, event_log=path), listener=listener)
    first = engine.submit([1], SamplingParams(max_tokens=1))
    assert len(wait_for(lambda: list(first))) == 1  # it had ended before the listener was told
    wait_for(engine.close)
    ends = [line["request_id"] for line in lines(path) if line["type"] == "FinishEvent"]
    assert ends == [first.request.id]


def test_a_listener_may_ask_for_the_status(own_model, wait_for):
    seen, box = [], []

    def listener(event):
        if isinstance(event, FinishEvent):
            seen.append(box[0].status()["finished_requests"])

    with Engine(own_model, config=EngineConfig(kv_cache_mib=1), listener=listener) as engine:
        box.append(engine)
        wait_for(lambda: engine.generate([[1], [2]], SamplingParams(max_tokens=2)))
    assert seen[-1] == 2
