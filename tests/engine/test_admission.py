"""What can never be served is refused at once, with the offending value."""

import pytest

from deepinfer_lab.engine import admission
from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.errors import (
    AdmissionError,
    ContextOverflow,
    DuplicateRequest,
    EmptyPrompt,
    InvalidSampling,
    InvalidToken,
    PoolOverflow,
    SettingError,
)


def check(prompt: int | tuple[int, ...], new: int, pool_tokens: int = 64) -> None:
    tokens = (1,) * prompt if isinstance(prompt, int) else prompt
    request = Request("r7", tokens, SamplingParams(max_tokens=new))
    admission.check(request, vocab_size=256, max_context=100, pool_tokens=pool_tokens)


@pytest.mark.parametrize(
    ("prompt", "new", "pool"), [(1, 1, 1), (64, 1, 64), (1, 64, 64), (99, 1, 200), (1, 99, 200), ((0, 255), 1, 64)]
)
def test_what_just_fits(prompt, new, pool):
    check(prompt, new, pool)


def test_no_prompt():
    with pytest.raises(EmptyPrompt, match=r"request r7.*at least 1"):
        check(0, 5)


@pytest.mark.parametrize("token", [-1, 256, 2**40, 2.0, 1.5, "a", None])
def test_tokens_outside_the_vocabulary(token):
    with pytest.raises(InvalidToken, match=f"request r7: token id {token!r}; allowed are the integers 0 to 255"):
        check((1, token, 2), 5)


@pytest.mark.parametrize(("prompt", "new", "total"), [(100, 1, 101), (1, 100, 101), (60, 50, 110)])
def test_more_than_the_context(prompt, new, total):
    with pytest.raises(ContextOverflow, match=f"{prompt} prompt tokens.*max_tokens {new} = {total} .*context of 100"):
        check(prompt, new, 1000)


@pytest.mark.parametrize(("prompt", "new", "total"), [(65, 1, 66), (1, 65, 66), (40, 50, 90)])
def test_more_than_the_pool(prompt, new, total):
    with pytest.raises(PoolOverflow, match=f"{prompt} prompt tokens.*max_tokens {new} = {total} .*65"):
        check(prompt, new)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -3), ("temperature", -0.1), ("temperature", float("nan")),
        ("temperature", float("inf")), ("top_k", -1), ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.01),
        ("top_p", float("nan")), ("seed", -1), ("seed", 2**64),
    ],
)  # fmt: skip
def test_sampling_values_out_of_range(field, value):
    with pytest.raises(InvalidSampling, match=rf"{field} = {value}: allowed is"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 1.5), ("max_tokens", "5"), ("top_k", 2.5), ("seed", 0.5), ("temperature", "hot"), ("top_p", None)],
)
def test_sampling_values_of_a_wrong_type(field, value):
    """Such a value would otherwise be found by the engine's thread, which dies of it, and every client with it."""
    with pytest.raises(InvalidSampling, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 1}, {"temperature": 0}, {"temperature": 1e-45}, {"top_k": 0}, {"top_p": 1}, {"top_p": 1e-9},
        {"seed": 0}, {"seed": 2**64 - 1},
    ],
)  # fmt: skip
def test_sampling_values_at_the_edge(params):
    assert SamplingParams(**params) == SamplingParams(**params)


@pytest.mark.parametrize("field", ["chunk_tokens", "max_batch", "block_size", "kv_cache_mib"])
@pytest.mark.parametrize("value", [0, -1])
def test_settings_below_one(field, value):
    with pytest.raises(SettingError, match=f"{field} = {value}: allowed is 1 or more"):
        EngineConfig(**{field: value})


def test_unknown_policy(tiny):
    with pytest.raises(SettingError, match=r"policy 'fast': allowed are .*serial"):
        Engine(tiny, config=EngineConfig(policy="fast", kv_cache_mib=1))


def test_a_block_larger_than_the_cache(tiny):
    with pytest.raises(SettingError, match="KV budget of 1,048,576 bytes: one block of 4096 tokens"):
        Engine(tiny, config=EngineConfig(block_size=4096, kv_cache_mib=1))


def test_refusals_are_counted_by_reason_and_harm_nobody(tiny, wait_for):
    with Engine(tiny, config=EngineConfig(kv_cache_mib=1)) as engine:
        assert wait_for(engine.status)["refusals"] == {}
        for prompt, params, error in (
            ([], SamplingParams(), EmptyPrompt),
            ([256], SamplingParams(), InvalidToken),
            ([1] * 500, SamplingParams(max_tokens=13), ContextOverflow),
            ([1] * 500, SamplingParams(max_tokens=14), ContextOverflow),
        ):
            with pytest.raises(error):
                engine.submit(prompt, params)
        handle = engine.submit([1], SamplingParams(max_tokens=500), "mine")
        with pytest.raises(DuplicateRequest, match="'mine'"):
            engine.submit([1], SamplingParams(max_tokens=1), "mine")
        refusals = wait_for(engine.status)["refusals"]
        assert refusals == {"empty_prompt": 1, "invalid_token": 1, "context_overflow": 2, "duplicate_request": 1}
        assert len(wait_for(lambda: engine.collect(handle)).tokens) == 500


def test_pool_overflow_through_the_engine(own_model, wait_for):
    with Engine(own_model, config=EngineConfig(kv_cache_mib=1)) as engine:
        assert engine.kv.num_blocks * engine.kv.block_size == 128
        with pytest.raises(PoolOverflow, match=r"100 prompt tokens.*max_tokens 30 = 130"):
            engine.submit([1] * 100, SamplingParams(max_tokens=30))
        (done,) = wait_for(lambda: engine.generate([[1] * 100], SamplingParams(max_tokens=29)))
        assert len(done.tokens) == 29


def test_each_reason_has_its_own_name():
    kinds = AdmissionError.__subclasses__()
    assert len({kind.reason for kind in kinds}) == len(kinds) == 6


def test_text_without_a_tokenizer(tiny):
    with (
        Engine(tiny, config=EngineConfig(kv_cache_mib=1)) as engine,
        pytest.raises(SettingError, match="no tokenizer"),
    ):
        engine.submit("hello")
