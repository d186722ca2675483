"""GPTQ against the procedure that it speeds up, and against what it must beat."""

import pytest
import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.quant import gptq, methods, rtn, scale_search
from deepinfer_lab.quant.layout import PackedWeight, unpack


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(k: int, rows: int = 2000, seed: int = 2) -> torch.Tensor:
    """Activations as networks have them: a few strong directions that all inputs share, and some inputs far larger."""
    x = random(rows, 8, seed=seed) @ random(8, k, seed=seed + 1) + 0.3 * random(rows, k, seed=seed + 2)
    return x * random(k, seed=seed + 3).abs().add(0.1)


def gram_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def output_error(weight: torch.Tensor, packed: PackedWeight, gram: torch.Tensor) -> float:
    missed = (weight - packed.dequantise(torch.float32)).double()
    return float(((missed @ gram.double()) * missed).sum())


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("k", "group"), [(64, 32), (256, 64), (384, 128)])
def test_outputs_move_less_than_under_any_rounding(bits, k, group):
    weight, gram = random(48, k), gram_of(correlated(k))
    errors = {
        name: output_error(weight, methods.quantise(name, weight, bits, group, gram), gram) for name in methods.METHODS
    }
    assert errors["gptq"] < 0.5 * errors["scale-search"] < 0.5 * errors["rtn"]


def test_without_correlations_there_is_nothing_to_make_up():
    weight = random(20, 128)
    packed = gptq.quantise(weight, 4, 64, torch.eye(128))
    plain = scale_search.quantise(weight, 4, 64, torch.ones(128))
    assert torch.equal(packed.packed, plain.packed)
    assert torch.equal(packed.scales, plain.scales)


def slow(weight: torch.Tensor, bits: int, group: int, gram: torch.Tensor) -> torch.Tensor:
    """Optimal brain quantisation, column by column, in float64: after each, the best change of all that are left, found by
    solving for it. Integers [N, K]."""
    n, k = weight.shape
    scales = scale_search.search_scales(weight.view(n, -1, group), bits, gram.diagonal()).double()
    h = gram.double() + gptq.DAMPING * gram.diagonal().mean().double() * torch.eye(k, dtype=torch.float64)
    left = gram.diagonal().argsort(descending=True, stable=True).tolist()
    w, q = weight.double().clone(), torch.zeros(n, k, dtype=torch.float64)
    while left:
        column, left = left[0], left[1:]
        step = scales[:, column // group]
        q[:, column] = (w[:, column] / step).round().clamp(*rtn.levels(bits))
        error = w[:, column] - q[:, column] * step
        if left:
            # Minimise (e, d) H (e, d)^T over the change d of what is left.
            w[:, left] += torch.outer(error, torch.linalg.solve(h[left][:, left], h[left, column]))
    return q


@pytest.mark.parametrize("bits", [3, 4])
def test_is_what_column_by_column_optimisation_gives(bits):
    weight, gram = random(24, 192), gram_of(correlated(192))
    found = unpack(gptq.quantise(weight, bits, 64, gram).packed, bits, 192)
    expected = slow(weight, bits, 64, gram)
    assert (found == expected).double().mean() > 0.995  # float32 rounds a value or two to the other side


def test_columns_of_a_group_may_stand_in_any_order():
    weight, gram = random(10, 128), gram_of(correlated(128))
    order = torch.cat([torch.randperm(64, generator=torch.Generator().manual_seed(1)) + begin for begin in (0, 64)])
    plain = gptq.quantise(weight, 4, 64, gram)
    moved = gptq.quantise(weight[:, order], 4, 64, gram[order][:, order])
    assert torch.equal(plain.scales, moved.scales)
    same = plain.dequantise(torch.float32)[:, order] == moved.dequantise(torch.float32)
    assert same.double().mean() > 0.99


@pytest.mark.parametrize("rows", [1, 20])
def test_fewer_activations_than_inputs(rows):
    weight, x = random(12, 256), correlated(256, rows=rows)
    gram = gram_of(x)
    packed = gptq.quantise(weight, 4, 64, gram)
    assert packed.scales.isfinite().all()
    assert output_error(weight, packed, gram) < 0.5 * output_error(weight, rtn.quantise(weight, 4, 64), gram)


def test_inputs_that_never_occur():
    weight, x = random(12, 128), correlated(128)
    x[:, [3, 70]] = 0
    packed = gptq.quantise(weight, 4, 64, gram_of(x))
    assert packed.dequantise(torch.float32).isfinite().all()
    assert torch.equal(gptq.quantise(weight, 4, 64, torch.zeros(128, 128)).scales.isnan().any(), torch.tensor(False))


def test_arguments_are_left_alone():
    weight, gram = random(8, 64), gram_of(correlated(64))
    copies = weight.clone(), gram.clone()
    gptq.quantise(weight, 4, 32, gram)
    assert torch.equal(weight, copies[0])
    assert torch.equal(gram, copies[1])


@pytest.mark.parametrize("gram", [torch.eye(32), torch.full((64, 64), torch.nan), torch.full((64, 64), torch.inf)])
def test_a_gram_matrix_that_is_none(gram):
    with pytest.raises(QuantisationError, match=r"gram matrix of shape \(\d+, \d+\): must be finite and \[64, 64\]"):
        gptq.quantise(random(4, 64), 4, 32, gram)
