"""Launcher of the kernel that joins attention over parts of the keys (`cuda/merge_attention.cu`)."""

import torch

from deepinfer_lab.kernels.loader import launch_op
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require

VECTOR = 8  # values of a thread


def merge_attention(
    parts: torch.Tensor,
    parts_lse: torch.Tensor,
    last: torch.Tensor,
    last_lse: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over all keys from that over S parts of them and over the rest, as in Flash-Decoding (Dao and others, 2023).

    Args:
        parts: float16 [S * C, H, D], each part's result for C tokens, one part after the other; D a multiple of 8.
        parts_lse: float32 [H, S * C], natural log of the sum of exponentials of each score; plus infinity for no keys.
        last: [C, H, D]. last_lse: [H, C], finite.
        out: [C, H, D], to write into.

    Returns:
        float16 [C, H, D].

    Raises:
        KernelError: another shape, dtype or layout.
    """
    name = "merge_attention"
    require(last.dim() == 3, f"{name}: last has shape {tuple(last.shape)}, must be [C, H, D]")
    tokens, heads, dims = last.shape
    require(dims % VECTOR == 0, f"{name}: D = {dims}, must be a multiple of {VECTOR}")
    splits = parts.shape[0] // tokens
    require(tokens * heads * dims < 2**31, f"{name}: {tokens * heads * dims} values, must be below {2**31}")
    out = torch.empty_like(last) if out is None else out
    for label, tensor, dtype, shape, aligned in (
        ("parts", parts, torch.float16, (splits * tokens, heads, dims), True),
        ("parts_lse", parts_lse, torch.float32, (heads, splits * tokens), False),
        ("last", last, torch.float16, (tokens, heads, dims), True),
        ("last_lse", last_lse, torch.float32, (heads, tokens), False),
        ("out", out, torch.float16, (tokens, heads, dims), True),
    ):
        expect(name, label, tensor, dtype, shape, last.device, aligned=aligned)
    blocks = -(-last.numel() // (OPS[name].threads * VECTOR))
    launch_op(OPS[name], (blocks,), (parts, parts_lse, last, last_lse, out), tokens, heads, dims, splits)
    return out
