"""Sampling: right in distribution, and a function of (logits, params, position) alone."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepinfer_lab.engine import sampling
from deepinfer_lab.engine.sampling import Choice, Draw, SamplingParams, choose, uniform
from deepinfer_lab.errors import InvalidSampling

INF, NAN = float("inf"), float("nan")


def logits(rows: int = 1, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def sample(rows: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    draws = [Draw(p, position) for p, position in zip(params, positions, strict=True)]
    return [choice.token for choice in choose(rows, draws)]


def chosen(
    row: list[float], context: tuple[int, ...] = (), banned: tuple[int, ...] = (), **params: float
) -> int | None:
    (choice,) = choose(torch.tensor([row]), [Draw(SamplingParams(**params), 7, context, banned)])
    return None if choice is None else choice.token


def counts(params: dict[str, float], row: torch.Tensor, draws: int = 3000, **others: tuple[int, ...]) -> list[int]:
    many = [Draw(SamplingParams(seed=seed, **params), 11, **others) for seed in range(draws)]
    tokens = [choice.token for choice in choose(row.expand(draws, -1), many)]
    return [tokens.count(token) for token in range(row.shape[-1])]


def assert_follows(observed: list[int], expected: list[float]) -> None:
    """Within five standard deviations of a binomial; seeds are fixed, so this passes always or never."""
    draws = sum(observed)
    for count, p in zip(observed, expected, strict=True):
        assert abs(count - draws * p) <= 5 * math.sqrt(draws * p * (1 - p))


def test_greedy_takes_the_likeliest():
    many = logits(20)
    assert sample(many, [SamplingParams()] * 20, list(range(20))) == [
        row.tolist().index(max(row.tolist())) for row in many
    ]


def test_logits_in_half_precision_are_taken_for_what_they_are():
    many = logits(20).half()
    heats = (0.0, 0.5, 1.5, 3.0) * 5
    params = [SamplingParams(temperature=heat, top_p=0.9, repetition_penalty=1.3, logprobs=3) for heat in heats]
    draws = [Draw(each, row, (0, 1)) for row, each in enumerate(params)]
    assert choose(many, draws) == choose(many.float(), draws)
    greedily = sampling.choose_greedily
    assert greedily(many) == greedily(many.float())


def test_greedy_ignores_everything_else():
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, seed=9)
    assert sample(logits(), [params], [4]) == sample(logits(), [SamplingParams()], [0])


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}, {"top_k": 1, "top_p": 0.5}])
def test_what_equals_greedy(narrow):
    for seed in range(30):
        params = SamplingParams(**{"temperature": 2.0, "seed": seed, **narrow})
        row = logits(seed=seed)
        assert sample(row, [params], [seed]) == row.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-39, 1e-45, 1e-60, 5e-324])
def test_temperatures_so_low_that_logits_overflow(temperature):
    row = logits(seed=3)
    assert sample(row, [SamplingParams(temperature=temperature)], [1]) == row.argmax(dim=-1).tolist()


def test_high_temperatures_flatten():
    assert_follows(counts({"temperature": 1e30}, torch.tensor([5.0, 0.0, -50.0, 2.0])), [0.25] * 4)


def test_ties_go_to_the_same_token_as_greedy():
    row = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]])
    assert sample(row, [SamplingParams(temperature=1.0, top_k=1)], [0]) == sample(row, [SamplingParams()], [0])


def test_plain_distribution():
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, -30.0])
    assert_follows(counts({"temperature": 1.0}, row), row.softmax(0).tolist())


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_divides_logits(temperature):
    row = torch.tensor([1.0, 0.0, -1.0, 2.0])
    assert_follows(counts({"temperature": temperature}, row), (row / temperature).softmax(0).tolist())


def test_top_k_keeps_k():
    row = torch.tensor([1.0, 0.5, -1.0, 2.0])
    kept = torch.tensor([1.0, 0.5, float("-inf"), 2.0])
    assert_follows(counts({"temperature": 1.0, "top_k": 3}, row), kept.softmax(0).tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.39, [3]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [0, 1, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, kept):
    probabilities = torch.tensor([0.2, 0.3, 0.1, 0.4])
    observed = counts({"temperature": 1.0, "top_p": top_p}, probabilities.log())
    expected = [float(p) if token in kept else 0.0 for token, p in enumerate(probabilities)]
    assert_follows(observed, [p / sum(expected) for p in expected])


def test_top_k_comes_before_top_p():
    """Of 0.4, 0.3, 0.2, 0.1 top_k = 2 leaves 0.57 and 0.43; top_p = 0.5 then keeps the first alone."""
    observed = counts(
        {"temperature": 1.0, "top_k": 2, "top_p": 0.5}, torch.tensor([0.2, 0.3, 0.1, 0.4]).log(), draws=200
    )
    assert observed == [0, 0, 0, 200]


def test_top_k_beyond_the_vocabulary_keeps_all():
    row = torch.tensor([1.0, 0.0, -1.0])
    assert counts({"temperature": 1.0, "top_k": 99}, row) == counts({"temperature": 1.0}, row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_many_equals_the_first(temperature):
    assert chosen([0.0] * 5000, temperature=temperature, top_k=1) == 0
    assert chosen([-1.0, *[0.0] * 5000], temperature=temperature, top_k=1) == 1


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.25 - 1e-9, 0), (0.25, 1), (0.5, 2), (0.75 - 1e-9, 2), (0.75, 3)])
def test_each_token_has_its_part_of_the_unit_interval(monkeypatch, u, token):
    monkeypatch.setattr(sampling, "uniform", lambda _seed, _position: u)
    assert chosen([1.0] * 4, temperature=1.0) == token


def test_unlikely_tokens_stay_possible(monkeypatch):
    monkeypatch.setattr(sampling, "uniform", lambda _seed, _position: 1 - 1e-10)
    assert chosen([0.0, -20.0], temperature=1.0) == 1  # one draw in 500 million
    assert chosen([0.0, -25.0], temperature=1.0) == 0


@given(vocab=st.integers(1, 40_000) | st.integers(0, 15).map(lambda n: 2**n), logit=st.floats(-5, 5, width=32))
@settings(deadline=None, max_examples=60)
def test_the_largest_draw_takes_the_last_token(vocab, logit):
    row = torch.full((1, vocab), logit)
    row[0, 0] = 5.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "uniform", lambda _seed, _position: 1 - 2**-53)
        assert sample(row, [SamplingParams(temperature=1.0)], [0]) == [vocab - 1]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_no_draw_takes_an_impossible_token(monkeypatch, u):
    monkeypatch.setattr(sampling, "uniform", lambda _seed, _position: u)
    for seed in range(50):
        row = logits(vocab=16, seed=seed)
        row[0, 3] = -1000.0
        (token,) = sample(row, [SamplingParams(temperature=1.0)], [0])
        assert token != 3


ROWS = st.lists(st.sampled_from([-INF, *(x / 2 for x in range(-8, 9))]), min_size=1, max_size=9)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.4, 1.0, 3.0)), top_k=st.integers(0, 6), top_p=st.sampled_from((1e-9, 0.3, 0.8, 1.0)),
    seed=st.integers(0, 2**64 - 1), min_p=st.sampled_from((0.0, 0.05, 0.4, 1.0)),
    repetition_penalty=st.sampled_from((1.0, 1.5, 2.0, 0.5)), logprobs=st.sampled_from((None, 0, 3, 20)),
)  # fmt: skip


def restrained(row: list[float], draw: Draw) -> np.ndarray:
    logits = np.array(row, dtype=np.float64)
    for token in set(draw.context):
        logits[token] *= draw.params.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    logits[[token for token in draw.banned if token < len(row)]] = -INF
    return logits


def ranked(row: list[float], draw: Draw) -> tuple[list[int], np.ndarray]:
    """What a draw may give, likeliest first, and the probabilities. One rule after the other, in plain float64."""
    p = draw.params
    logits = restrained(row, draw)
    order = sorted(range(len(row)), key=lambda token: (-logits[token], token))
    if p.temperature == 0:
        return order[:1], np.ones(1)
    weights = np.exp((logits[order] - logits.max()) / p.temperature)
    kept = min(p.top_k or len(row), len(row))
    if p.top_p < 1:
        share = weights[:kept] / weights[:kept].sum()
        before = np.cumsum(share) - share
        assume(np.abs(before - p.top_p).min() > 1e-9)  # at the very edge rounding decides
        kept = sum(before < p.top_p)
    edge = weights / weights[0] - p.min_p
    assume(((edge == 0) | (np.abs(edge) > 1e-9)).all())
    kept = min(kept, sum(edge >= 0))
    return order[:kept], weights[:kept] / weights[:kept].sum()


@given(row=ROWS, params=PARAMS, position=st.integers(0, 10**6), data=st.data())
@settings(deadline=None, max_examples=300)
def test_equals_a_plain_computation(row, params, position, data):
    context = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=6))
    banned = data.draw(st.sets(st.integers(0, 12), max_size=5))
    draw = Draw(params, position, context, banned)
    (choice,) = choose(torch.tensor([row]), [draw])
    if restrained(row, draw).max() == -INF:
        assert choice is None
        return
    tokens, probabilities = ranked(row, draw)
    edges = np.cumsum(probabilities)
    u = uniform(params.seed, position)
    assume(np.abs(edges - u).min() > 1e-9)
    assert choice.token == tokens[int((edges < u).sum())]


def test_min_p_is_relative_to_the_likeliest():
    observed = counts({"temperature": 1.0, "min_p": 0.49}, torch.tensor([0.2, 0.3, 0.1, 0.4]).log())
    assert_follows(observed, [0.2 / 0.9, 0.3 / 0.9, 0.0, 0.4 / 0.9])


def test_min_p_comes_after_temperature():
    """Squared, 0.2 is a quarter as likely as 0.4."""
    observed = counts({"temperature": 0.5, "min_p": 0.3}, torch.tensor([0.2, 0.3, 0.1, 0.4]).log())
    assert_follows(observed, [0.0, 9 / 25, 0.0, 16 / 25])


def test_min_p_of_one_keeps_the_top_and_its_equals():
    assert_follows(counts({"temperature": 2.0, "min_p": 1.0}, torch.tensor([0.0, 3.0, 3.0, 2.999])), [0, 0.5, 0.5, 0])
    assert_follows(counts({"temperature": 2.0, "min_p": 1.0}, torch.tensor([0.0, 3.0, 3.1, 2.999])), [0, 0, 1.0, 0])


def test_top_p_comes_before_min_p():
    """Of 0.4, 0.3, 0.2, 0.1 min_p = 0.6 leaves 0.57 and 0.43, of which top_p = 0.55 would keep the first alone."""
    row = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()
    assert_follows(counts({"temperature": 1.0, "top_p": 0.55, "min_p": 0.6}, row), [0.0, 3 / 7, 0.0, 4 / 7])


@pytest.mark.parametrize("repetitions", [1, 5])
def test_repetition_penalty(repetitions):
    """Once for each token, however often it occurred. A negative logit moves away from 0, a logit of 0 stays."""
    row = torch.tensor([1.5, -1.0, 0.0, 1.0])
    observed = counts({"temperature": 1.0, "repetition_penalty": 2.0}, row, context=(0, 1, 2) * repetitions)
    assert_follows(observed, torch.tensor([0.75, -2.0, 0.0, 1.0]).softmax(0).tolist())


def test_repetition_penalty_when_greedy():
    assert chosen([2.0, 1.9, -1.0], (0,), repetition_penalty=1.1) == 1
    assert chosen([2.0, 1.9, -1.0], (0, 1), repetition_penalty=1.1) == 0
    assert chosen([2.0, 1.9, -1.0], (), repetition_penalty=1.1) == 0
    assert chosen([2.0, 1.9, -1.0], (0,), repetition_penalty=1.0) == 0
    assert chosen([-1.0, -1.05], (1,), repetition_penalty=0.9) == 1
    assert chosen([-1.0, -1.05], (0,), repetition_penalty=1.1) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_all_banned_but_one(temperature):
    row = logits(vocab=30)[0].tolist()
    for left in range(30):
        others = tuple(token for token in range(30) if token != left)
        assert chosen(row, (), others, temperature=temperature, top_k=3, top_p=0.5, min_p=0.5) == left


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_banned(temperature):
    assert chosen([1.0, 2.0], (), (0, 1), temperature=temperature) is None
    assert chosen([1.0, -INF], (), (0,), temperature=temperature) is None
    assert chosen([1.0, 2.0], (), (2, 10**9, -1), temperature=temperature, top_k=1) == 1  # not in the vocabulary


def test_top_k_counts_what_is_not_banned():
    row = torch.tensor([3.0, 2.0, 1.0, 0.0])
    observed = counts({"temperature": 1.0, "top_k": 2}, row, banned=(0, 2))
    assert_follows(observed, torch.tensor([-INF, 2.0, -INF, 0.0]).softmax(0).tolist())


def test_a_ban_outweighs_a_penalty_below_one():
    assert chosen([1.0, 5.0], (1,), (1,), repetition_penalty=0.1) == 0


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.1}]
)
@pytest.mark.parametrize(
    "broken", [[NAN] * 4, [0.0, NAN, 2.0, 3.0], [0.0, INF, 2.0, 3.0], [INF, -INF, NAN, 0.0], [-INF] * 4, [NAN, 9, 9, 9]]
)
@pytest.mark.parametrize("extras", [{}, {"banned": (1,)}, {"context": (1, 2)}, {"banned": (0, 1, 2, 3)}])
def test_a_broken_row_is_alone(params, broken, extras):
    """A model that overflows spoils its own request. Raising here would end every other request as well."""
    good = logits(2, vocab=4)
    rows = torch.stack((good[0], torch.tensor(broken), good[1]))
    p = SamplingParams(repetition_penalty=1.3, logprobs=2, **params)
    draws = [Draw(p, 1), Draw(p, 2, **extras), Draw(p, 3)]
    first, none, last = choose(rows, draws)
    assert none is None
    assert [first, last] == choose(good, [draws[0], draws[2]])


def test_a_logit_of_minus_infinity_breaks_nothing():
    for temperature in (0.0, 1.0):
        assert chosen([-INF, 0.0, -INF], temperature=temperature) == 1


def test_a_penalty_that_overflows_breaks_its_row_alone():
    row = [3e38, 1.0]
    assert chosen(row, (0,), repetition_penalty=1e-3) is None
    assert chosen(row, (1,), repetition_penalty=1e-3) == 0


@pytest.mark.parametrize("wanted", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [3, 50])
def test_logprobs_are_those_of_the_model(wanted, vocab):
    """Whatever else changes the choice: it may even fall on a token far down."""
    (row,) = logits(vocab=vocab, seed=5).tolist()
    exact = np.array(row) - np.log(np.exp(np.array(row)).sum())
    order = np.argsort(-exact)
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=3.0, logprobs=wanted)
    banned = tuple(int(token) for token in order[:2])
    (choice,) = choose(torch.tensor([row]), [Draw(params, 3, range(vocab), banned)])
    assert choice.token not in banned
    assert choice.logprob == pytest.approx(exact[choice.token], abs=1e-12)
    assert [token for token, _ in choice.top] == order[:wanted].tolist()
    assert [value for _, value in choice.top] == pytest.approx(exact[order[:wanted]], abs=1e-12)


def test_logprobs_of_equals_name_the_lower_ids():
    row = torch.zeros((1, 3000))
    (choice,) = choose(row, [Draw(SamplingParams(logprobs=4), 0)])
    assert choice == Choice(
        0, pytest.approx(-math.log(3000)), tuple((i, pytest.approx(-math.log(3000))) for i in range(4))
    )


def test_each_row_has_the_logprobs_that_it_asks_for():
    choices = choose(logits(4), [Draw(SamplingParams(logprobs=n), 0) for n in (None, 3, 0, None)])
    assert [len(choice.top) for choice in choices] == [0, 3, 0, 0]
    assert [choice.logprob is None for choice in choices] == [True, False, False, True]
    assert choices[1].top[0] == (choices[1].token, choices[1].logprob)


@given(
    rows=st.lists(
        st.tuples(
            PARAMS, st.integers(0, 100), st.lists(st.integers(0, 49), max_size=4), st.sets(st.integers(0, 60), max_size=4),
        ),
        min_size=1, max_size=8,
    ),
    seed=st.integers(0, 99), broken=st.sets(st.integers(0, 7), max_size=2), data=st.data(),
)  # fmt: skip
@settings(deadline=None)
def test_alone_or_in_any_batch(rows, seed, broken, data):
    draws = [Draw(*row) for row in rows]
    many = logits(len(rows), seed=seed)
    many[[row for row in broken if row < len(rows)], 3] = NAN
    together = choose(many, draws)
    assert together == [choose(many[i : i + 1], draws[i : i + 1])[0] for i in range(len(rows))]
    order = data.draw(st.permutations(range(len(rows))))
    assert [together[i] for i in order] == choose(many[order], [draws[i] for i in order])


def test_no_rows():
    assert choose(logits(0), []) == []


def test_logits_are_left_alone():
    many = logits(3)
    before = many.clone()
    hot = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.2, repetition_penalty=2.0, logprobs=2)
    choose(many, [Draw(hot, 1, (1, 2), (3,)), Draw(SamplingParams(), 2), Draw(SamplingParams(), 2, (), (4, 5))])
    assert torch.equal(many, before)


@pytest.mark.parametrize(("logprobs", "transfers"), [(None, 1), (5, 3)])
def test_the_host_waits_for_the_device_only_for_results(monkeypatch, logprobs, transfers):
    """Tensors of the meta device hold no values. Whoever reads one, or mixes devices, fails."""
    read = []

    def tolist(tensor: torch.Tensor) -> list:
        read.append(tensor.shape)
        return np.ones(tensor.shape, dtype=np.int64).tolist()

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    hot = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.2, repetition_penalty=2.0, logprobs=logprobs)
    choose(
        torch.empty((3, 50), device="meta"), [Draw(hot, 1, (1, 2), (3, 99)), Draw(SamplingParams(), 2), Draw(hot, 3)]
    )
    assert read[0] == (2, 3)
    assert len(read) == transfers


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("min_p", -0.1, "from 0 to 1"), ("min_p", 1.1, "from 0 to 1"), ("min_p", NAN, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0"), ("repetition_penalty", -1.0, "above 0"),
        ("repetition_penalty", INF, "above 0, and finite"), ("repetition_penalty", NAN, "above 0"),
        ("min_tokens", -1, "from 0 to max_tokens = 128"), ("min_tokens", 129, "from 0 to max_tokens = 128"),
        ("logprobs", -1, "None, or from 0 to 20"), ("logprobs", 21, "None, or from 0 to 20"),
        ("stop", "", "strings that are not empty"), ("stop", ["a", ""], "strings that are not empty"),
        ("stop", ("a", 3), "strings that are not empty"), ("stop", (b"a",), "strings"), ("stop", b"a", "a list or tuple"),
        ("stop", None, "a list or tuple"), ("stop", {"a"}, "a list or tuple"), ("stop", 3, "a list or tuple"),
        ("stop_token_ids", (1, -1), "ids of 0 or more"), ("stop_token_ids", 5, "a list or tuple"),
        ("stop_token_ids", "12", "a list or tuple"), ("stop_token_ids", ("1",), "an integer"),
        ("stop_token_ids", (1.0,), "an integer"), ("stop_token_ids", (True,), "an integer"),
        ("stop_token_ids", None, "a list or tuple"),
        ("min_p", "a", "a number"), ("min_p", None, "a number"), ("repetition_penalty", 1j, "a number"),
        ("min_tokens", 1.0, "an integer"), ("min_tokens", None, "an integer"), ("logprobs", 2.0, "an integer"),
        ("logprobs", True, "an integer"), ("max_tokens", True, "an integer"), ("temperature", False, "a number"),
        ("temperature", 10**400, "a number"), ("top_p", Fraction(1, 10**400), "above 0"),
    ],
)  # fmt: skip
def test_refusals(field, value, allowed):
    with pytest.raises(InvalidSampling, match=f"^{field} = .*: allowed is .*{allowed}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0}, {"min_p": 1}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e308}, {"min_tokens": 128},
        {"max_tokens": 3, "min_tokens": 3}, {"logprobs": 0}, {"logprobs": 20}, {"stop": ()}, {"stop_token_ids": [0, 2**40]},
    ],
)  # fmt: skip
def test_values_at_the_edge(params):
    SamplingParams(**params)


def test_one_stop_string_stands_for_itself():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "end"]).stop == ("a", "end")


def test_values_of_other_libraries_become_plain():
    """So that nothing odd meets torch on the engine's thread, and equal parameters hash alike."""
    odd = SamplingParams(
        max_tokens=np.int64(5), temperature=Fraction(1, 2), top_k=np.uint8(3), top_p=np.float32(0.5), seed=np.uint64(2**64 - 1),
        min_p=Fraction(1, 4), repetition_penalty=2, stop_token_ids=[np.int32(7)], stop=["x"], logprobs=np.int16(2),
    )  # fmt: skip
    plain = SamplingParams(5, 0.5, 3, 0.5, 2**64 - 1, False, 0.25, 2.0, (7,), ("x",), 0, 2)
    assert (odd, hash(odd), repr(odd)) == (plain, hash(plain), repr(plain))
    assert len(choose(logits(), [Draw(odd, 0)])) == 1


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_uniform_is_uniform_and_uncorrelated(vary):
    draws = [uniform(i, 5) if vary == "seed" else uniform(5, i) for i in range(4000)]
    assert all(0 <= u < 1 for u in draws)
    assert len(set(draws)) == len(draws)
    mean = sum(draws) / len(draws)
    assert abs(mean - 0.5) < 5 / math.sqrt(12 * len(draws))
    neighbours = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(draws)) / len(draws) * 12
    assert abs(neighbours) < 5 / math.sqrt(len(draws))


def test_uniform_is_a_function():
    assert uniform(3, 4) == uniform(3, 4)
    assert uniform(3, 4) != uniform(4, 3)
    assert uniform(2**64 - 1, 0) != uniform(0, 0)
