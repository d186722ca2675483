"""When a request ends, in the scheduler and as clients see it."""

import pytest
from bench import Bench, alone_on, request

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.engine import Engine
from deepinfer_lab.engine.request import Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import SettingError

SMALL = EngineConfig(kv_cache_mib=1)


def with_params(item: Request, **params: object) -> Request:
    return Request(item.id, item.prompt, SamplingParams(**{"max_tokens": item.params.max_tokens, **params}))


def test_a_stop_token_ends_it_whatever_ignore_eos_says(tiny):
    item = request("x", 9, 12, temperature=1.0, seed=5)
    tokens = alone_on(tiny)(item)
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    bench = Bench(tiny)
    bench.add(with_params(item, temperature=1.0, seed=5, ignore_eos=True, stop_token_ids=(tokens[place],)))
    bench.run()
    assert bench.outputs["x"] == tokens[: place + 1]
    assert bench.reasons["x"] == [FinishReason.STOP]


@pytest.mark.parametrize("least", [1, 3, 6])
def test_no_end_before_min_tokens(tiny, least):
    """The end token is banned, not merely ignored: the text goes on without it."""
    item = request("x", 6, 8)
    end = alone_on(tiny)(item)[0]
    bench = Bench(tiny, eos=[end])
    bench.add(with_params(item, min_tokens=least))
    bench.run()
    tokens = bench.outputs["x"]
    assert end not in tokens[:least]
    assert len(tokens) > least or bench.reasons["x"] == [FinishReason.LENGTH]


def test_a_stop_string_ends_it_and_is_not_shown(own_model, byte_tokenizer, wait_for):
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=4)
    with Engine(own_model, byte_tokenizer(), SMALL) as engine:
        whole = wait_for(lambda: engine.generate(["Once"], params))[0]
        # A model of random weights says mostly bytes that are no text.
        first, stop = next(
            (i, c) for i, c in enumerate(whole.text) if i > 2 and c.isascii() and c not in whole.text[:i]
        )
        cut = SamplingParams(max_tokens=24, temperature=1.0, seed=4, stop=stop)
        done = wait_for(lambda: engine.generate(["Once"], cut))[0]
        streamed = wait_for(lambda: "".join(engine.stream("Once", cut)))
    assert done.text == streamed == whole.text[:first]
    assert done.reason is FinishReason.STOP
    assert done.tokens == whole.tokens[: len(done.tokens)]
    assert len(done.tokens) < len(whole.tokens)


def test_a_stop_string_needs_a_tokenizer(tiny):
    with Engine(tiny, config=SMALL) as engine, pytest.raises(SettingError, match="no tokenizer"):
        engine.submit([1], SamplingParams(stop="x"))


def test_logprobs_reach_the_client(own_model, wait_for):
    with Engine(own_model, config=SMALL) as engine:
        params = SamplingParams(max_tokens=3, logprobs=2)
        asked, plain = (wait_for(lambda p=p: engine.generate([[1, 2]], p))[0] for p in (params, SamplingParams(3)))
    assert asked.tokens == plain.tokens
    assert plain.logprobs == ((None, ()),) * 3
    for token, (logprob, top) in zip(asked.tokens, asked.logprobs, strict=True):
        assert top[0] == (token, logprob)  # greedy: the likeliest is the one that was taken
        assert len(top) == 2
        assert top[1][1] <= logprob < 0
