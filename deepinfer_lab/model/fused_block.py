"""One block for a few rows in five launches.

At so few rows a kernel takes some two microseconds however little it does, mostly waiting for the one before it. So each
product takes what stands before and after it into its own launch, with the same bits:

    norm, qkv | rotate, write, attend | o, + x | norm, gate_up, silu(gate) * up | down, + x

Attention, which leaves memory idle, has the other products' weights brought to the L2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from deepinfer_lab.kernels.mma_small import Norm

if TYPE_CHECKING:
    from deepinfer_lab.model.decoder import Block


def fused_rows(blocks: Sequence[Block]) -> frozenset[int]:
    """Numbers of rows that `fused_block` takes of all blocks."""
    norms = [linear.norm_rows for block in blocks for linear in (block.qkv, block.gate_up)]
    residuals = [linear.residual_rows for block in blocks for linear in (block.o, block.down)]
    return frozenset.intersection(*norms, *residuals) if blocks else frozenset()


def fused_block(
    block: Block,
    x: torch.Tensor,
    eps: float,
    attend: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    """Hidden states x [T, hidden] -> [T, hidden]. attend: [T, q_size + 2 * kv_size] -> [T, q_size], and what to read ahead."""
    qkv = block.qkv.fused(x, norm=Norm(block.input_norm, eps))
    ahead = block.o.read_ahead + block.gate_up.read_ahead + block.down.read_ahead
    x = block.o.fused(attend(qkv, ahead), residual=x)
    gated = block.gate_up.fused(x, norm=Norm(block.post_norm, eps), gated=True)
    return block.down.fused(gated, residual=x)
