"""Launcher of the tensor-core kernel for a few rows, on weights in tiles (`quant/tiles.py`, `cuda/mma_small.cuh`)."""

import torch

from deepinfer_lab.kernels.catalogue import GROUPS, MAX_GRID_Y, TILED
from deepinfer_lab.kernels.check import MAX_INT
from deepinfer_lab.kernels.loader import launch_op, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import MMA_ROWS, MMA_WARPS, OPS
from deepinfer_lab.kernels.ops_check import expect, require

UNIT_N, UNIT_K, UNIT_BYTES = 16, 64, 512
RESIDENT = {
    8: 2,
    16: 1,
    32: 1,
}  # blocks of 16 warps that a multiprocessor holds at once, by activation rows; registers limit


def w4_mma_small(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[M, K] @ weight[N, K].T + bias[N], the weight as `TiledWeight` has it; made for M up to 32, right for any.

    Weights are exact and sums float32, rounded once. A row's result is the same bits for every M that has the same number of
    warps (`warps_for`). Every 32 rows read the weights again.

    Args:
        x: float16 [M, K] on a CUDA device. Copied where it is not contiguous or not 16-byte aligned.
        tiles: uint8 [ceil(N / 16), ceil(K / 64), 512]. scales: float16 [ceil(N / 16), ceil(K / 64) * 64 / group, 8, 2].
        n: N. group: 32, 64 or 128, a divisor of K. bias: float16 [N], or None.
        out: float16 [M, N], contiguous, to write into; None allocates it.

    Returns:
        float16 [M, N].

    Raises:
        KernelError: a shape, dtype, layout or device outside these limits.
    """
    product = TILED["w4_mma_small"]
    name = product.name
    require(x.dtype == torch.float16, f"{name}: x has dtype {x.dtype}, must be torch.float16")
    require(x.dim() == 2, f"{name}: x has shape {tuple(x.shape)}, must be [M, K]")
    m, k = x.shape
    require(1 <= m <= product.max_m, f"{name}: M = {m}, must be 1 to {product.max_m}")
    require(1 <= n <= MAX_GRID_Y * UNIT_N, f"{name}: N = {n}, must be 1 to {MAX_GRID_Y * UNIT_N}")
    require(group in GROUPS, f"{name}: group = {group}, must be one of {', '.join(map(str, GROUPS))}")
    require(k > 0 and k % group == 0, f"{name}: K = {k}, must be a positive multiple of group = {group}")
    require(k <= MAX_INT // 2, f"{name}: K = {k} is too large")
    require(
        not (torch.is_grad_enabled() and x.requires_grad),
        f"{name}: x requires a gradient and this kernel has no backward pass; call it under torch.inference_mode()",
    )
    count, units = -(-n // UNIT_N), -(-k // UNIT_K)
    expect(name, "tiles", tiles, torch.uint8, (count, units, UNIT_BYTES), x.device, aligned=True)
    expect(name, "scales", scales, torch.float16, (count, units * UNIT_K // group, 8, 2), x.device)
    if bias is not None:
        expect(name, "bias", bias, torch.float16, (n,), x.device)
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    out = torch.empty(m, n, dtype=torch.float16, device=x.device) if out is None else out
    expect(name, "out", out, torch.float16, (m, n), x.device)

    rows = next((rows for rows in MMA_ROWS if m <= rows), MMA_ROWS[-1])
    op = OPS[f"w4_mma_{rows}_{warps_for(rows, count, multiprocessors(x.device.index))}"]
    # Blocks that read the same weights follow one another: the second finds them in the L2.
    launch_op(op, (-(-m // rows), count), (x, tiles, scales, bias, out), m, n, k, group)
    return out


def warps_for(rows: int, blocks: int, multiprocessors: int) -> int:
    """Warps of each block: many where the card holds all blocks at once nevertheless, so that few blocks fill it too.

    Args:
        rows: activation rows of a block, one of `MMA_ROWS`. blocks: of 16 outputs.

    Returns:
        One of `MMA_WARPS`.
    """
    few, many = MMA_WARPS
    return many if blocks <= multiprocessors * RESIDENT[rows] else few
