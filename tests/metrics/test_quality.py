"""Perplexity, agreement and KL through the paged forward, against one dense forward for each window."""

import dataclasses

import numpy as np
import pytest
import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.metrics import quality
from deepinfer_lab.metrics.quality import Comparison, TeacherForced, compare, teacher_forced
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named

TOKENS = torch.randint(0, 256, (700,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = dataclasses.replace(SHAPES["tiny"], tied_embeddings=False)
    source = SyntheticSource(config, "tiny")
    return build_decoder(source, plan_named("none"), group=64, device=torch.device("cpu"), dtype=torch.float32)


@torch.inference_mode()
def direct(model: Decoder, tokens: list[int], window: int) -> tuple[list[float], list[int]]:
    """One block and one chunk per window, log-softmax by hand."""
    nll, top1 = [], []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        pool = KVPool(model.kv_shape, 1, window, model.device)
        step = StepInput.build([Span(part, 0, [0], all_logits=True)], window, model.device)
        logs = model.forward(step, pool).double().log_softmax(dim=-1)
        for position, token in enumerate(part[1:]):
            nll.append(-float(logs[position, token]))
            top1.append(int(logs[position].argmax()))
    return nll, top1


SHORT = [(2, 2), (3, 2), (2, 512), (9, 4), (12, 4), (49, 16), (48, 16), (33, 32), (100, 37)]
LONG = [(256, 512), (257, 512), (258, 512), (513, 512), (300, 257)]  # either side of the chunk that is really used


@pytest.mark.parametrize(
    ("chunk", "count", "window"), [(c, *sizes) for c in (3, 16) for sizes in SHORT] + [(256, *sizes) for sizes in LONG]
)
def test_every_position_once(model, monkeypatch, chunk, count, window):
    monkeypatch.setattr(quality, "CHUNK", chunk)
    tokens = TOKENS[:count]
    found = teacher_forced(model, tokens, window)
    nll, top1 = direct(model, tokens, window)
    assert len(found.nll) == count - -(-count // window)
    assert found.nll.dtype == np.float64
    assert found.nll == pytest.approx(nll, rel=1e-4, abs=1e-4)
    assert found.top1.tolist() == top1
    assert found.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)


def test_windows_do_not_see_each_other(model):
    whole = teacher_forced(model, TOKENS[:96], 32)
    parts = [teacher_forced(model, TOKENS[at : at + 32], 32).nll for at in (0, 32, 64)]
    assert whole.nll == pytest.approx(np.concatenate(parts), rel=1e-5)


@pytest.mark.parametrize(
    ("count", "window", "values"),
    [
        (10, 1, "window 1 over 10"), (10, 0, "window 0"), (10, -4, "window -4"), (600, 513, "window 513 over 600"),
        (1, 16, "over 1 tokens"), (0, 16, "over 0 tokens"),
    ],
)  # fmt: skip
def test_windows_that_are_not_allowed(model, count, window, values):
    with pytest.raises(SettingError, match=f"{values}.*2 to 512.*at least 2 tokens"):
        teacher_forced(model, TOKENS[:count], window)


def test_perplexity_by_hand():
    two = TeacherForced(np.log([2.0, 8.0]), np.array([1, 2]))
    assert two.perplexity == pytest.approx(4.0)


def test_agreement_by_hand():
    one, other = (TeacherForced(np.zeros(4), np.array(top)) for top in ([1, 2, 3, 4], [1, 9, 3, 9]))
    assert one.agreement(other) == other.agreement(one) == 0.5
    assert one.agreement(one) == 1.0


class Rounded:
    """The fixture's weights, not packed, so that rounding the same weights is what differs."""

    name, tokenizer = "rounded", None

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.tensor = SyntheticSource(config, "tiny").tensor


@pytest.fixture(scope="module")
def coarse(model) -> Decoder:
    return build_decoder(Rounded(model.config), plan_named("w3"), group=64, device=model.device, dtype=torch.float32)


def test_a_quantised_model_agrees_with_itself_and_less_with_the_dense_one(model, coarse):
    dense, few = teacher_forced(model, TOKENS, 128), teacher_forced(coarse, TOKENS, 128)
    assert few.agreement(few) == 1.0
    assert 0.05 < few.agreement(dense) < 1.0  # chance would be 1 in 256


@torch.inference_mode()
def logits(model: Decoder, tokens: list[int], window: int) -> np.ndarray:
    """Float64 logits of every position that has a next token, one block and one chunk per window."""
    found = []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        step = StepInput.build([Span(part, 0, [0], all_logits=True)], window, model.device)
        found.append(model.forward(step, KVPool(model.kv_shape, 1, window, model.device))[:-1].double().numpy())
    return np.concatenate(found)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("chunk", "count", "window"), [(c, *sizes) for c in (3, 16) for sizes in SHORT] + [(256, *sizes) for sizes in LONG]
)
def test_comparison_is_what_numpy_says(model, coarse, monkeypatch, chunk, count, window):
    monkeypatch.setattr(quality, "CHUNK", chunk)
    tokens = TOKENS[:count]
    found = compare(coarse, model, tokens, window)
    q, p = (softmax(logits(each, tokens, window)) for each in (coarse, model))
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-3)
    assert found.top1 == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert found.perplexity == pytest.approx(teacher_forced(coarse, tokens, window).perplexity, rel=1e-6)


def test_a_model_is_no_distance_from_itself_and_some_from_another(model, coarse):
    itself = compare(model, model, TOKENS, 100)
    assert itself == Comparison(pytest.approx(teacher_forced(model, TOKENS, 100).perplexity), 0.0, 1.0)
    there, back = compare(coarse, model, TOKENS, 100), compare(model, coarse, TOKENS, 100)
    assert there.top1 == back.top1 < 1.0
    assert 0 < there.kl != back.kl > 0  # a divergence, not a distance: which one is the reference matters


def test_both_models_go_chunk_by_chunk(model, coarse, monkeypatch):
    """So that no more than one chunk's logits have to be kept."""
    monkeypatch.setattr(quality, "CHUNK", 16)
    seen, forward = [], Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, step, kv: seen.append(self) or forward(self, step, kv))
    compare(coarse, model, TOKENS[:70], 32)
    assert seen == [coarse, model] * 5


def test_models_that_cannot_be_compared(model):
    def other(**changes: int) -> Decoder:
        source = SyntheticSource(dataclasses.replace(model.config, **changes), "other")
        return build_decoder(source, plan_named("none"), group=64, device=model.device, dtype=torch.float32)

    for pair in [(other(vocab_size=260), model), (model, other(vocab_size=260))]:
        with pytest.raises(SettingError, match=r"vocabularies of 2\d\d and 2\d\d tokens"):
            compare(*pair, TOKENS, 32)
    for pair in [(other(max_context=64), model), (model, other(max_context=64))]:
        with pytest.raises(SettingError, match=r"window 65 over 700.*2 to 64"):
            compare(*pair, TOKENS, 65)
