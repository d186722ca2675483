"""Searched scales lose no more than any other candidate, under the loss that they are searched for."""

import pytest
import torch

from deepinfer_lab.quant import rtn, scale_search
from deepinfer_lab.quant.layout import PackedWeight


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss(weight: torch.Tensor, packed: PackedWeight, importance: torch.Tensor) -> torch.Tensor:
    """Of each group: [N, G]."""
    missed = (weight - packed.dequantise(torch.float32)).double().square() * importance
    return missed.view(packed.n, -1, packed.group).sum(2)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_group_loses_more_than_by_rounding_to_nearest(bits, group):
    weight, importance = random(40, 256), random(256, seed=1).square()
    searched = scale_search.quantise(weight, bits, group, importance)
    plain = rtn.quantise(weight, bits, group)
    ours, theirs = loss(weight, searched, importance), loss(weight, plain, importance)
    assert (ours <= theirs * (1 + 1e-6)).all()
    assert ours.sum() < 0.9 * theirs.sum()


@pytest.mark.parametrize("bits", [3, 4])
def test_the_best_of_all_candidates(bits):
    weight, importance = random(6, 64), random(64, seed=1).square()
    w = weight.view(6, 2, 32)
    losses = []
    for factor in [sign * f for f in scale_search.FACTORS for sign in (1, -1)]:
        scales = (rtn.extreme_scales(w, bits) * factor).to(torch.float16)
        missed = w - rtn.nearest(w, scales, bits) * scales.float().unsqueeze(2)
        losses.append((missed.square() * importance.view(2, 32)).sum(2))
    best = torch.stack(losses).amin(0)
    found = loss(weight, scale_search.quantise(weight, bits, 32, importance), importance)
    assert torch.allclose(found, best.double(), rtol=1e-5)


def test_what_matters_is_fitted():
    """All importance on one weight: it is hit almost exactly, though the group's extreme is far away."""
    weight = torch.linspace(-1, 1, 32)[None].clone()
    weight[0, 5] = 0.3
    importance = torch.zeros(32)
    importance[5] = 1.0
    found = scale_search.quantise(weight, 3, 32, importance).dequantise(torch.float32)[0, 5]
    plain = rtn.quantise(weight, 3, 32).dequantise(torch.float32)[0, 5]
    assert abs(found - 0.3) < 0.01 < abs(plain - 0.3)


def test_rows_are_searched_in_parts_alike(monkeypatch):
    weight, importance = random(50, 128), random(128, seed=1).square()
    whole = scale_search.quantise(weight, 4, 64, importance)
    monkeypatch.setattr(scale_search, "CHUNK", 128 * 7)
    parts = scale_search.quantise(weight, 4, 64, importance)
    assert torch.equal(whole.packed, parts.packed)
    assert torch.equal(whole.scales, parts.scales)


def test_groups_of_zeros_and_inputs_that_never_occur():
    weight = random(3, 128)
    weight[:, :64] = 0
    packed = scale_search.quantise(weight, 4, 64, torch.zeros(128))
    dense = packed.dequantise(torch.float32)
    assert not dense[:, :64].any()
    assert dense.isfinite().all()
