"""What a product of a few rows does before and after: the CUDA sources on the CPU, bit for bit against a launch for each."""

import pytest
import torch
from small_products import activations, error, force, stand_in

from deepinfer_lab.kernels import TILED_LAUNCHERS, elementwise
from deepinfer_lab.kernels.mma_small import Norm, fuses
from deepinfer_lab.quant.interleave import interleave, interleaved_rows
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.tiles import to_tiles

EPS = 1e-5
FUSED = ("8", "8_pair", "8_many")
bits_and_form = pytest.mark.parametrize(("bits", "form"), [(bits, form) for bits in (4, 3) for form in FUSED])
# Rows shorter than a warp's share, ending inside a unit, and longer than a team of threads takes at a time; blocks that stay
# for several outputs, and for some once less.
SIZES = ((1, 16, 32, 32), (3, 176, 192, 64), (8, 304, 128, 128), (5, 48, 2080, 32), (2, 80, 4224, 128))


@pytest.fixture
def on_host(host_ops, monkeypatch):
    stand_in(monkeypatch, host_ops.launch)
    monkeypatch.setattr(elementwise, "launch_op", host_ops.launch)
    monkeypatch.setattr(elementwise, "expect", lambda *_, **__: None)


def product(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, **more: object) -> torch.Tensor:
    """Into memory that held NaN, unless `out` is given."""
    tiled = to_tiles(weight)
    columns = weight.n // 2 if more.get("gated") else weight.n
    out = more.pop("out", torch.full((x.shape[0], columns), torch.nan).half())
    return TILED_LAUNCHERS[f"w{weight.bits}_mma_small"](
        x, tiled.tiles, tiled.scales, weight.n, weight.group, bias, out, **more
    )


def norm_of(k: int) -> Norm:
    return Norm(1 + activations(1, k, seed=5)[0] / 4, EPS)


@bits_and_form
def test_a_norm_before(on_host, make_weight, monkeypatch, bits, form):
    force(monkeypatch, form)
    for m, n, k, group in SIZES:
        weight, x, norm = make_weight(bits, n - 3, k, group), activations(m, k) * 3, norm_of(k)
        out = product(x, weight, norm=norm)
        assert torch.equal(out, product(elementwise.rms_norm(x, norm.weight, EPS), weight)), (m, n, k, group)
        normed = torch.nn.functional.rms_norm(x.double(), (k,), norm.weight.double(), EPS)
        assert error(out, normed @ weight.dequantise(torch.float64).T) < 2e-3


@bits_and_form
def test_a_gate_after(on_host, make_weight, monkeypatch, bits, form):
    """The weight's rows in turn; the result is that of gate beside up."""
    force(monkeypatch, form)
    for m, n, k, group in SIZES:
        weight, bias, norm, x = make_weight(bits, n, k, group), activations(1, n)[0], norm_of(k), activations(m, k) * 3
        in_turn, its_bias = interleave(weight), bias[interleaved_rows(n)]
        out = product(x, in_turn, its_bias, norm=norm, gated=True)
        normed = elementwise.rms_norm(x, norm.weight, EPS)
        assert torch.equal(out, product(normed, in_turn, its_bias, gated=True))
        assert torch.equal(out, elementwise.silu_mul(product(normed, in_turn, its_bias), interleaved=True))
        assert torch.equal(out, elementwise.silu_mul(product(normed, weight, bias))), (m, n, k, group)


@pytest.mark.parametrize(("bits", "form"), [(4, "8"), (3, "8_pair"), (4, "8_many"), (3, "16"), (4, "32_many")])
def test_an_addition_after(on_host, make_weight, monkeypatch, bits, form):
    """As `add_rms_norm` adds, in place or not. With a norm before, too."""
    rows = force(monkeypatch, form)
    for m, n, k, group in ((1, 40, 192, 64), (rows, 176, 128, 128)):
        weight, bias, x, residual = (
            make_weight(bits, n, k, group),
            activations(1, n)[0],
            activations(m, k),
            activations(m, n),
        )
        ones = torch.ones(n).half()
        total, _ = elementwise.add_rms_norm(residual, product(x, weight, bias), ones, EPS)
        assert torch.equal(product(x, weight, bias, residual=residual), total)
        if rows == 8:
            norm = norm_of(k)
            delta = product(elementwise.rms_norm(x, norm.weight, EPS), weight, bias)
            expected = elementwise.add_rms_norm(residual, delta, ones, EPS)[0]
            assert torch.equal(product(x, weight, bias, norm=norm, residual=residual), expected)
        in_place = residual.clone()
        assert product(x, weight, bias, residual=in_place, out=in_place) is in_place
        assert torch.equal(in_place, total)


@bits_and_form
def test_a_row_does_not_depend_on_its_batch(on_host, make_weight, monkeypatch, bits, form):
    force(monkeypatch, form)
    weight, x, norm = make_weight(bits, 32, 2240, 64), activations(8, 2240), norm_of(2240)
    together = product(x, weight, norm=norm, gated=True)
    for size in (1, 3):
        parts = [product(rows, weight, norm=norm, gated=True) for rows in x.split(size)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize(("bits", "form"), [(4, "8"), (3, "8_pair"), (4, "8_many")])
def test_nan_and_infinity_stay_in_their_rows(on_host, make_weight, monkeypatch, bits, form):
    force(monkeypatch, form)
    weight, x, norm = make_weight(bits, 32, 96, 32), activations(6, 96), norm_of(96)
    right = product(x, weight, norm=norm)
    x[1, 95], x[4, 0] = torch.nan, torch.inf
    out = product(x, weight, norm=norm)
    good = [0, 2, 3, 5]
    assert torch.equal(out[good], right[good])
    assert out[[1, 4]].isnan().all()


def test_shared_memory_is_free_of_races(racing_host_ops, make_weight, monkeypatch):
    stand_in(monkeypatch, racing_host_ops.launch)
    for bits, form, m in ((4, "8", 3), (3, "8_many", 5)):
        force(monkeypatch, form)
        weight, x, norm = make_weight(bits, 16 * 11, 192, 64), activations(m, 192), norm_of(192)
        normed = torch.nn.functional.rms_norm(x.double(), (192,), norm.weight.double(), EPS)
        gate, up = (normed @ weight.dequantise(torch.float64).T).chunk(2, dim=1)
        out = product(x, interleave(weight), norm=norm, gated=True)
        assert error(out, torch.nn.functional.silu(gate) * up) < 2e-3


def test_nothing_is_fused_without_a_gpu_nor_for_more_rows():
    assert not fuses(4, 1, 2048, 2048, 128, "cpu")
    assert not fuses(4, 9, 2048, 2048, 128, "cuda:0")
