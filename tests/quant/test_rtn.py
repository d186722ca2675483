"""Properties of round-to-nearest that hold for every weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.quant.layout import unpack
from deepinfer_lab.quant.rtn import quantise


@st.composite
def weights(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A weight [N, K] with entries from tiny to huge, whose scales are normal float16 numbers."""
    bits, group = draw(st.sampled_from((3, 4))), draw(st.sampled_from((32, 64, 128)))
    n, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    magnitude = 10 ** draw(st.floats(-2, 4))
    weight = torch.randn((n, groups * group), generator=generator)
    if draw(st.booleans()):
        weight = weight * (torch.rand(weight.shape, generator=generator) < 0.1)  # mostly zeros, some whole groups
    return weight * magnitude, bits, group


@given(weights())
@settings(deadline=None)
def test_error_is_at_most_half_a_step_except_at_the_clamped_end(case):
    weight, bits, group = case
    packed = quantise(weight, bits, group)
    step = packed.scales.float().repeat_interleave(group, dim=1)
    q = unpack(packed.packed, bits, packed.k)
    error = (packed.dequantise(torch.float32) - weight).abs()
    highest = (1 << (bits - 1)) - 1
    half = step.abs() * 0.5
    clamped = (q == highest) & (weight / step > highest + 0.5)
    # The largest magnitude is -2**(bits-1) steps, give or take float16's rounding, so its mirror image loses one step.
    bound = torch.where(clamped, 2.02 * half, half)
    assert bool((error <= bound * (1 + 1e-4) + 1e-7).all())


@given(weights())
@settings(deadline=None)
def test_every_value_takes_the_nearest_level(case):
    weight, bits, group = case
    packed = quantise(weight, bits, group)
    step = packed.scales.float().repeat_interleave(group, dim=1)
    levels = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1)).float()
    best = (weight.unsqueeze(2) - step.unsqueeze(2) * levels).abs().min(dim=2).values
    error = (packed.dequantise(torch.float32) - weight).abs()
    assert torch.allclose(error, best, rtol=1e-3, atol=1e-5 * float(weight.abs().max()))


@given(weights())
@settings(deadline=None, max_examples=30)
def test_quantising_again_changes_nothing(case):
    weight, bits, group = case
    once = quantise(weight, bits, group).dequantise(torch.float32)
    assert torch.equal(quantise(once, bits, group).dequantise(torch.float32), once)


@given(weights())
@settings(deadline=None, max_examples=30)
def test_strides_do_not_matter(case):
    weight, bits, group = case
    straight, strided = quantise(weight, bits, group), quantise(weight.t().contiguous().t(), bits, group)
    assert torch.equal(straight.packed, strided.packed)
    assert torch.equal(straight.scales, strided.scales)
    assert strided.packed.is_contiguous()  # the kernels take nothing else
    assert strided.scales.is_contiguous()


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_extreme_lands_on_the_lowest_level(bits, sign):
    weight = torch.zeros(1, 32)
    weight[0, 5] = sign * 0.5
    packed = quantise(weight, bits, 32)
    assert unpack(packed.packed, bits, 32)[0, 5] == -(1 << (bits - 1))
    assert packed.dequantise(torch.float32)[0, 5] == sign * 0.5


@pytest.mark.parametrize("bits", [3, 4])
def test_zeros_stay_zeros(bits):
    packed = quantise(torch.zeros(2, 128), bits, 64)
    assert not packed.dequantise(torch.float32).any()
    assert packed.scales.isfinite().all()


def test_a_group_below_float16_becomes_zero_and_harms_no_other():
    weight = torch.cat([torch.full((1, 32), 1e-12), torch.full((1, 32), 0.5)], dim=1)
    dense = quantise(weight, 4, 32).dequantise(torch.float32)
    assert not dense[0, :32].any()
    assert torch.equal(dense[0, 32:], weight[0, 32:])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 65_504.0 * 8 * 1.01, -1e30])
def test_values_that_no_scale_can_hold(poison):
    weight = torch.ones(2, 64)
    weight[1, 40] = poison
    with pytest.raises(QuantisationError, match=r"NaN, Inf.*65,504"):
        quantise(weight, 4, 32)


@pytest.mark.parametrize(("bits", "steps"), [(3, 4), (4, 8)])
def test_the_largest_weight_that_a_scale_can_hold(bits, steps):
    weight = torch.zeros(1, 32)
    weight[0, 0] = 65_504.0 * steps
    assert quantise(weight, bits, 32).dequantise(torch.float32)[0, 0] == weight[0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype(dtype):
    weight = torch.randn((2, 64), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(quantise(weight, 4, 32).packed, quantise(weight.float(), 4, 32).packed)


@pytest.mark.parametrize("shape", [(64,), (2, 2, 64), ()])
def test_only_matrices(shape):
    with pytest.raises(QuantisationError, match=r"only matrices \[N, K\]"):
        quantise(torch.ones(shape), 4, 32)


def test_k_that_the_group_does_not_divide():
    with pytest.raises(QuantisationError, match="K = 96 is not a multiple of group 64; groups that divide it: 32"):
        quantise(torch.ones(2, 96), 4, 64)
