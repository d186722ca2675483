"""One block for a few rows in five launches, or seven.

At so few rows a kernel takes some two microseconds however little it does, mostly waiting for the one before it. So each
product takes what stands before and after it into its own launch, with the same bits:

    norm, qkv | rotate, write, attend | o, + x | norm, gate_up, silu(gate) * up | down, + x

From a few rows more on, the norm is a launch of its own: each of a product's blocks would make it, of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from deepinfer_lab.kernels.elementwise import rms_norm
from deepinfer_lab.kernels.mma_small import Norm

if TYPE_CHECKING:
    from deepinfer_lab.model.decoder import Block
    from deepinfer_lab.quant.linear import QuantLinear


def fused_rows(blocks: Sequence[Block]) -> frozenset[int]:
    """Numbers of rows that `fused_block` takes of all blocks."""
    rows = [linear.fused_rows for block in blocks for linear in (block.qkv, block.o, block.gate_up, block.down)]
    return frozenset.intersection(*rows) if blocks else frozenset()


def fused_block(
    block: Block, x: torch.Tensor, eps: float, attend: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Hidden states x [T, hidden] -> [T, hidden]. attend: [T, q_size + 2 * kv_size] -> [T, q_size]."""
    qkv = normed_product(block.qkv, x, Norm(block.input_norm, eps))
    x = block.o.fused(attend(qkv), residual=x)
    gated = normed_product(block.gate_up, x, Norm(block.post_norm, eps), gated=True)
    return block.down.fused(gated, residual=x)


def normed_product(linear: QuantLinear, x: torch.Tensor, norm: Norm, gated: bool = False) -> torch.Tensor:
    """RMSNorm of x [T, hidden], and its product: in one launch or in two."""
    if len(x) in linear.norm_rows:
        return linear.fused(x, norm=norm, gated=gated)
    return linear.fused(rms_norm(x, norm.weight, norm.eps), gated=gated)
