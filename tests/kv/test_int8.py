"""INT8 KV: the error that the format promises, nothing silently finite, and scales that move with their values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.kv.int8 import dequantise, quantise
from deepinfer_lab.kv.pool import KVPool, KVShape

CPU = torch.device("cpu")
SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal


def round_trip(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Through a pool's `write` and `gather`. x: [T, heads, D] -> x' and scales [T, heads]."""
    tokens, heads, head_dim = x.shape
    pool = KVPool(KVShape(2, heads, head_dim, dtype, quantised=True), tokens, 1, CPU)
    slots = torch.arange(tokens).flip(0)
    pool.write(1, slots, x.to(dtype), -x.to(dtype))
    k, v = pool.gather(1, slots[None])
    assert k.dtype == v.dtype == dtype
    assert torch.equal(k, -v) or not k.isfinite().all()
    return k[0], pool.layer(1).k_scale[slots].float()


def assert_within_half_a_step(x: torch.Tensor, found: torch.Tensor, scale: torch.Tensor) -> None:
    """|x - x'| <= scale / 2, plus what rounding adds to a subnormal scale, plus one rounding to the compute dtype."""
    rounded = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0
    bound = scale / 2 * (1 + 1e-5) + torch.where(scale < SMALLEST_NORMAL, 127 * 2.0**-25, 0)
    error = (x.double() - found.double()).abs()
    assert (error <= bound.unsqueeze(-1) + rounded * found.double().abs()).all(), error.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-8, 1e-6, 1e-4, 1e-2, 1.0, 300.0])
def test_error_on_random_vectors(dtype, magnitude):
    generator = torch.Generator().manual_seed(round(magnitude * 1e8))
    x = (torch.randn((500, 3, 64), generator=generator) * magnitude).to(dtype)
    found, scale = round_trip(x, dtype)
    assert_within_half_a_step(x, found, scale)
    torch.testing.assert_close(scale, x.float().abs().amax(-1) / 127, rtol=2.0**-11, atol=2.0**-25)


@given(
    values=st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=8),
    outlier=st.sampled_from((0.0, 2.0**-24, 127.0, 60000.0, -60000.0)),
)
@settings(deadline=None, max_examples=300)
def test_error_on_adversarial_vectors(values, outlier):
    x = torch.tensor([[[*values, outlier]]])
    assert_within_half_a_step(x, *round_trip(x))


def test_one_outlier_costs_the_rest_of_its_own_vector_only():
    x = torch.full((2, 2, 8), 0.25)
    x[0, 1, 3] = 1000.0
    found, scale = round_trip(x)
    assert found[0, 1].nonzero().flatten().tolist() == [3]
    assert scale[0, 1] == pytest.approx(1000 / 127, rel=2.0**-11)
    torch.testing.assert_close(found[[0, 1, 1], [0, 0, 1]], x[[0, 1, 1], [0, 0, 1]], rtol=2.0**-11, atol=0)


def test_rounding_is_to_nearest_even_and_symmetric():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0])
    q, scale = quantise(x)
    assert scale == 1
    assert q.tolist() == [127, 0, 2, 2, 0, -2, -2, -127]


def test_a_scale_that_was_rounded_down_does_not_wrap_around():
    """x / scale exceeds 127 by up to half where the scale is subnormal. As int8, 128 would be -128."""
    largest = torch.cat((torch.linspace(2.0**-25, 2.0**-22, 5001) * 127, torch.linspace(1, 2, 5001) * 127))
    q, scale = quantise(torch.stack((largest, -largest), 1))
    assert (largest / scale.float() > 128).any()
    assert (q[:, 0] >= 0).all()
    assert torch.equal(q[:, 0], -q[:, 1])


@pytest.mark.parametrize("value", [0.0, 127 * 2.0**-26, 1e7, float("nan"), float("inf"), float("-inf")])
def test_values_without_a_usable_scale_are_stored_as_zeros(value):
    q, _scale = quantise(torch.tensor([value, 1e-9, -value]))
    assert not q.any()


def test_zeros_stay_zeros():
    found, scale = round_trip(torch.tensor([[[0.0, -0.0, 0.0]]]))
    assert not found.any()
    assert not scale.any()


def test_values_too_small_for_any_scale_become_zeros():
    found, scale = round_trip(torch.full((1, 1, 4), 127 * 2.0**-26))
    assert not found.any()
    assert not scale.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rest", [0.0, 1.0, 100.0])
def test_what_is_not_finite_never_comes_back_finite(dtype, bad, rest):
    x = torch.full((2, 2, 8), rest)
    x[0, 1, 5] = bad
    found, scale = round_trip(x, dtype)
    assert not found[0, 1].isfinite().any()
    assert not scale[0, 1].isfinite()
    others = torch.tensor([[True, False], [True, True]])
    torch.testing.assert_close(found[others].float(), x[others], rtol=2.0**-8, atol=0)


def test_a_scale_beyond_float16_is_not_finite():
    found, _scale = round_trip(torch.tensor([[[1e7, 1.0, 0.0], [8e6, 1.0, 0.0]]]))
    assert not found[0, 0].isfinite().any()
    assert found[0, 1, 0] == pytest.approx(8e6, rel=2.0**-8)


def test_dequantise_rounds_once():
    """In bfloat16 itself, 127 * 1.0009765625 would first lose the scale's last bits."""
    scale = torch.tensor([1 + 2.0**-10], dtype=torch.float16)
    for value in range(-127, 128):
        found = dequantise(torch.tensor([[value]], dtype=torch.int8), scale, torch.bfloat16)
        assert found.item() == torch.tensor(value * (1 + 2.0**-10)).to(torch.bfloat16).item()


def test_layers_blocks_and_k_and_v_do_not_mix():
    generator = torch.Generator().manual_seed(1)
    pool = KVPool(KVShape(3, 2, 16, torch.float16, quantised=True), 4, 4, CPU)
    wrote = (torch.randn((3, 2, 16, 2, 16), generator=generator) * torch.tensor([1, 50]).view(2, 1, 1, 1)).half()
    order = torch.randperm(16, generator=generator)
    for layer in range(3):
        pool.write(layer, order, *wrote[layer])
    table = torch.tensor([[2, 0], [3, 1]])
    slots = (table.unsqueeze(2) * 4 + torch.arange(4)).flatten(1)
    rank = order.argsort()  # which row was written to a slot
    for layer in range(3):
        for found, x in zip(pool.gather(layer, table), wrote[layer], strict=True):
            q, scale = quantise(x[rank[slots]])
            assert torch.equal(found, dequantise(q, scale, torch.float16))


def test_clearing_takes_values_and_scales_of_these_blocks_only():
    pool = KVPool(KVShape(2, 1, 4, torch.float32, quantised=True), 3, 2, CPU)
    for layer in (0, 1):
        pool.write(layer, torch.arange(6), torch.full((6, 1, 4), torch.nan), torch.full((6, 1, 4), torch.inf))
    pool.clear([2, 0])
    for layer in (0, 1):
        memory = pool.layer(layer)
        for scale in (memory.k_scale, memory.v_scale):
            assert scale.shape == (6, 1)
            assert scale.isfinite().flatten().tolist() == [True, True, False, False, True, True]
        for found in pool.gather(layer, torch.tensor([[0, 2]])):
            assert not found.any()


def test_a_layer_is_a_view_that_a_kernel_can_write():
    pool = KVPool(KVShape(2, 2, 4, torch.float16, quantised=True), 3, 2, CPU)
    layer = pool.layer(1)
    assert layer.k.dtype == layer.v.dtype == torch.int8
    assert layer.k_scale.dtype == layer.v_scale.dtype == torch.float16
    assert layer.k.shape == (6, 2, 4)
    assert all(t.is_contiguous() for t in (layer.k, layer.v, layer.k_scale, layer.v_scale))
    layer.v[3, 1] = torch.tensor([1, -2, 3, -127], dtype=torch.int8)
    layer.v_scale[3, 1] = 0.5
    k, v = pool.gather(1, torch.tensor([[1]]))
    assert v[0, 1, 1].tolist() == [0.5, -1.0, 1.5, -63.5]
    assert not k.any()
    assert not any(tensor.any() for tensor in pool.gather(0, torch.tensor([[0, 1, 2]])))
