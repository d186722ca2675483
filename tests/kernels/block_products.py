"""What tests of products in blocks of rows share: mma_block and wide on the CPU."""

from collections.abc import Callable

import torch
from arrivals import Arrivals
from small_products import activations

from deepinfer_lab.kernels import mma_block
from deepinfer_lab.kernels.mma_block import Plan, tiles_of
from deepinfer_lab.kernels.mma_cuts import Cut
from deepinfer_lab.kernels.wide_cuts import WideCut
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles

__all__ = ["H200", "Arrivals", "activations", "check_every_value", "check_propagation", "error", "run"]

H200 = 132, 227 * 1024  # multiprocessors, bytes of shared memory that a block may have


def run(cut: Cut, blocks: int, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What this plan makes of it; `blocks` 0 stands for a block a tile."""
    tiled, out = to_tiles(weight), torch.full((x.shape[0], weight.n), torch.nan).half()
    chosen = Plan(cut, blocks or tiles_of(cut, *out.shape))
    mma_block.run(chosen, x, tiled.tiles, tiled.scales, bias, out, weight.group)
    return out


def error(out: torch.Tensor, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> float:
    expected = x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())
    return float((out.double() - expected).norm() / expected.norm())


def check_every_value(cut: Cut | WideCut, n: int, k: int, run: Callable[..., torch.Tensor] = run) -> None:
    """One-hot activations and power-of-two scales return the weight itself, bit for bit."""
    count = 2**cut.bits
    values = torch.arange(count, dtype=torch.int8) - count // 2
    q = torch.stack([values.roll(row).repeat(k // count) for row in range(n)])
    weight = PackedWeight(cut.bits, 32, n, k, pack(q, cut.bits), torch.full((n, k // 32), 0.25).half())
    weight.scales[:, 1::2] = -2.0
    weight.scales[::3] = 2.0**-14
    assert torch.equal(run(cut, 0, torch.eye(k).half(), weight), weight.dequantise(torch.float16).T)


def check_propagation(
    cut: Cut | WideCut, make_weight: Callable[..., PackedWeight], run: Callable[..., torch.Tensor] = run
) -> None:
    """Where K ends inside a unit, neither NaN nor infinity of the same row nor of the next one may leak into the padding."""
    k = 96
    weight, x = make_weight(cut.bits, 21, k, 32), activations(11, k)
    x[3, 0], x[6, k - 1], x[8, k // 2] = torch.inf, torch.nan, -torch.inf
    reference = (x.double()[:, None] * weight.dequantise(torch.float64)[None]).sum(2)
    out, finite = run(cut, 0, x, weight), reference.isfinite()
    assert torch.equal(out.isnan(), reference.isnan())
    assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
    assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)
    assert finite[[0, 1, 2, 4, 5, 7, 9, 10]].all()
