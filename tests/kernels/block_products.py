"""What tests of products in blocks of rows share: mma_block and wgmma on the CPU."""

import torch
from arrivals import Arrivals
from small_products import activations

from deepinfer_lab.kernels import mma_block
from deepinfer_lab.kernels.mma_block import Plan, tiles_of
from deepinfer_lab.kernels.mma_cuts import Cut
from deepinfer_lab.kernels.wgmma_cuts import WgmmaCut
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.tiles import to_tiles

__all__ = ["H200", "Arrivals", "activations", "error", "run"]

H200 = 132, 227 * 1024  # multiprocessors, bytes of shared memory that a block may have


def run(
    cut: Cut | WgmmaCut, blocks: int, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What this plan makes of it; `blocks` 0 stands for a block a tile."""
    tiled, out = to_tiles(weight), torch.full((x.shape[0], weight.n), torch.nan).half()
    chosen = Plan(cut, blocks or tiles_of(cut, *out.shape))
    mma_block.run(chosen, x, tiled.tiles, tiled.scales, bias, out, weight.group)
    return out


def error(out: torch.Tensor, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> float:
    expected = x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())
    return float((out.double() - expected).norm() / expected.norm())
