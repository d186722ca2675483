"""Sampling: right in distribution, and a function of (logits, params, position) alone."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.engine import sampling
from deepinfer_lab.engine.sampling import SamplingParams, sample, uniform


def logits(rows: int = 1, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def counts(params: dict[str, float], row: torch.Tensor, draws: int = 3000) -> list[int]:
    many = [SamplingParams(seed=seed, **params) for seed in range(draws)]
    tokens = sample(row.expand(draws, -1), many, [11] * draws)
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


def test_logits_that_are_not_numbers_do_not_raise():
    """A model that overflows spoils its own request. Raising here would end every other request as well."""
    row = torch.full((1, 8), float("nan"))
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)):
        (token,) = sample(row, [params], [3])
        assert 0 <= token < 8


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


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_no_draw_takes_an_impossible_token(monkeypatch, u):
    monkeypatch.setattr(sampling, "uniform", lambda _seed, _position: u)
    for seed in range(50):
        row = logits(vocab=16, seed=seed)
        row[0, 3] = -1000.0
        (token,) = sample(row, [SamplingParams(temperature=1.0)], [0])
        assert token != 3


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from((0.0, 0.7, 1.0)), st.integers(0, 5), st.sampled_from((0.3, 1.0)), st.integers(0, 2**64 - 1),
            st.integers(0, 100),
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
@settings(deadline=None)
def test_alone_or_in_any_batch(rows):
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, seed=seed) for t, k, p, seed, _ in rows]
    positions = [position for *_, position in rows]
    many = logits(len(rows))
    together = sample(many, params, positions)
    assert together == [sample(many[i : i + 1], [params[i]], [positions[i]])[0] for i in range(len(rows))]
    backwards = sample(many.flip(0), params[::-1], positions[::-1])
    assert together == backwards[::-1]


def test_logits_are_left_alone():
    many = logits(2)
    before = many.clone()
    sample(many, [SamplingParams(temperature=0.5, top_k=3, top_p=0.5), SamplingParams()], [1, 2])
    assert torch.equal(many, before)


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
