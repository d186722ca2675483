"""Loads and the server: what is sent, when, and what is said where nothing could be served."""

from collections import Counter

import pytest

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.event import StepEvent
from deepinfer_lab.errors import AdmissionError, RequestFailed, SettingError
from deepinfer_lab.lab.load_spec import InsertionLoad, Load, OpenLoad
from deepinfer_lab.lab.serve_bench import OpenMeasured, OpenRound, measure, measure_open
from deepinfer_lab.lab.serving import WARM_UP, Server, trace_of
from deepinfer_lab.metrics.latency import summarise
from deepinfer_lab.model.load import LoadedModel, load_model

CONFIG = EngineConfig(kv_cache_mib=4)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("synthetic:tiny", bits="none", device="cpu")


def open_measured(offered, achieved):
    rounds = tuple(OpenRound(summarise([]), offered, each, 0.0) for each in achieved)
    return OpenMeasured("w4", OpenLoad("poisson", (), ()), rounds)


def test_a_drawn_load_is_the_same_each_time_and_bursts_only_where_asked():
    even, bursty = (OpenLoad.drawn("gamma", 10.0, cv, 400, 5, 3) for cv in (0.01, 4.0))
    assert even == OpenLoad.drawn("gamma", 10.0, 0.01, 400, 5, 3)
    assert set(even.sizes) == {(5, 3)}
    assert len(even.due) == len(even.sizes) == 400
    widest = [max(b - a for a, b in zip(load.due, load.due[1:], strict=False)) for load in (even, bursty)]
    assert widest[0] < 0.11
    assert widest[1] > 0.5


def test_a_replayed_load_keeps_every_size_beside_its_time(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n14,7,2\n10,5,1\n11,0,9\n12,6,3\n", encoding="utf-8")
    load = OpenLoad.replayed(path, speed_up=2, max_concurrency=3)
    assert load == OpenLoad("trace", (0, 1, 2), ((5, 1), (6, 3), (7, 2)), 3, skipped=1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Load(0), "concurrency 0"),
        (lambda: InsertionLoad(document_tokens=0), "document-tokens 0"),
        (lambda: InsertionLoad(readers=-1), "readers -1"),
        (lambda: OpenLoad.drawn("poisson", 1.0, 1.0, 0, 1, 1), "requests 0"),
        (lambda: OpenLoad.drawn("poisson", 1.0, 1.0, 1, 1, 0), "output-tokens 0"),
        (lambda: OpenLoad.drawn("poisson", 0.0, 1.0, 1, 1, 1), "rate 0.0"),
    ],
)
def test_a_load_of_nothing_is_refused(make, said):
    with pytest.raises(SettingError, match=f"{said}: allowed is"):
        make()


def test_rows_of_a_closed_load_hold_its_traces_and_only_its_own_steps(model):
    with Server(model, CONFIG) as server:
        result = server.serve(Load(2, 9, 5, 2))
    rows = list(result.rows())
    assert [trace_of(row) for row in rows if row["row"] == "request"] == list(result.traces)
    assert all(len(trace.token_times) == 5 and trace.prompt_tokens == 9 for trace in result.traces)
    steps = [row for row in rows if row["row"] == "step"]
    assert {name for row in steps for name in row["requests"]} == {f"c2-{i}" for i in range(4)}
    prefilled = Counter()
    for row in steps:
        if row["phase"] == "prefill":
            prefilled.update(row["requests"])
    assert set(prefilled) == {trace.request_id for trace in result.traces}


def test_an_open_load_is_served_with_its_sizes_whatever_the_model_says(model):
    load = OpenLoad("trace", (0.0, 0.0, 0.01), ((5, 1), (60, 7), (7, 2)))
    with Server(model, CONFIG) as server:
        result = server.serve_open(load)
    assert [(trace.prompt_tokens, len(trace.token_times)) for trace in result.traces] == list(load.sizes)
    assert [trace.sent for trace in result.traces] == list(load.due)


def test_prompts_of_a_model_without_a_tokenizer_are_random_valid_and_repeatable(model):
    with Server(model, CONFIG) as server:
        first, again = server._prompts([50, 50, 3]), server._prompts([50, 50, 3])
    assert first == again
    assert first[0] != first[1]
    assert [len(prompt) for prompt in first] == [50, 50, 3]
    assert all(0 <= token < model.decoder.config.vocab_size for prompt in first for token in prompt)


def test_text_goes_on_from_one_prompt_to_the_next(smollm2_path):
    """Whatever the lengths: a load of equal prompts and one of unequal prompts read the same text."""
    with Server(load_model("smollm2-135m", bits="none", device="cpu"), EngineConfig(kv_cache_mib=64)) as server:
        equal, unequal = server._prompts([40, 40]), server._prompts([10, 70])
    assert [*equal[0], *equal[1]] == [*unequal[0], *unequal[1]]


def test_a_load_of_which_nothing_ends_well_says_why(model):
    with Server(model, CONFIG) as server:
        with pytest.raises(RequestFailed, match=r"all 2 requests failed, the first by ContextOverflow.*512"):
            server.serve(Load(1, 510, 64))
        with pytest.raises(RequestFailed, match="all 1 requests failed"):
            server.serve_open(OpenLoad("trace", (0.0,), ((600, 1),)))
        with pytest.raises(SettingError, match="prompt-tokens 480: allowed are 1 to 479"):
            server.insert(InsertionLoad(1, 480, 10))
        with pytest.raises(SettingError, match="64 readers: allowed are 1 to 63"):
            server.insert(InsertionLoad(64, 1, 10))
        with pytest.raises(AdmissionError, match="600"):
            server.insert(InsertionLoad(1, 8, 600))
        assert len(server.serve(Load(1, 8, 2)).traces) == 2  # and the server goes on


def test_some_refused_requests_are_counted_and_the_others_measured(model):
    load = OpenLoad("trace", (0.0, 0.0), ((600, 1), (8, 4)))
    (found,) = measure_open(model, CONFIG, load, 1).rounds
    assert (found.summary.requests, found.summary.errors) == (1, 1)
    assert found.summary.output_tokens == 4


def test_the_listener_hears_one_round_of_all_loads(model):
    heard = []
    list(measure(model, CONFIG, [Load(1, 8, 3, 1), Load(2, 8, 3, 1)], 3, None, "", heard.append))
    ends = Counter(event.request_id for event in heard if hasattr(event, "reason"))
    assert ends == {"warm-up-0": 2, "warm-up-1": 1, "c1-0": 1, "c2-0": 1, "c2-1": 1}
    assert any(isinstance(event, StepEvent) for event in heard)
    assert WARM_UP.max_tokens == 4


def test_requests_of_one_token_have_no_tpot_and_no_roofline(model):
    (found,) = measure(model, CONFIG, [Load(1, 8, 1, 2)], 1, None, "")
    assert found.row()["tpot_s"] is None
    assert found.row()["roofline_share"] is None
    assert found.tokens_per_s > 0


@pytest.mark.parametrize(
    ("offered", "achieved", "kept_up"),
    [
        (10.0, [9.5, 9.5, 2.0], True),  # the median counts: one slow round is no broken load
        (10.0, [9.4, 9.4, 10.0], False),
        (None, [3.0], True),  # all due at once
        (10.0, [None], True),  # one request
    ],
)
def test_whether_the_offered_rate_was_achieved(offered, achieved, kept_up):
    assert open_measured(offered, achieved).kept_up is kept_up
