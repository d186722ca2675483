"""Weights in tiles (`quant/tiles.py`) to dense float16, and the products that cuBLAS computes from them: as `dequantise.py`,
for layers whose weights lie in tiles alone, since fewer rows are multiplied from there.
"""

import torch

from deepinfer_lab.kernels.catalogue import PRODUCTS
from deepinfer_lab.kernels.check import MAX_INT
from deepinfer_lab.kernels.dequantise import multiply_slices
from deepinfer_lab.kernels.loader import launch_op
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require
from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, checked

Maybe = torch.Tensor | None
WARPS = 8  # of a block of cuda/dequantise_tiles.cuh, a unit each


def dequantise_tiles_cublas(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """x[M, K] @ weight[N, K].T + bias[N]: slices of the weight are made dense, then multiplied, with the same bits as
    `w4_dequantise_cublas` and `w3_dequantise_cublas` give for the weight as it is stored.

    Args:
        x: float16 [M, K] on a CUDA device. tiles: uint8 [ceil(N / 16), ceil(K / 128), 256 * bits], which says the bits.
        scales: float16 [ceil(N / 16), ceil(K / 128) * 128 / group, 8, 2]. group: 32, 64 or 128, a divisor of K.
        bias: float16 [N], or None. out: float16 [M, N], contiguous, to write into; None allocates it.

    Raises:
        KernelError: a shape, dtype, layout or device outside these limits.
    """
    name = "dequantise_tiles_cublas"
    require(
        tiles.dim() == 3, f"{name}: tiles has shape {tuple(tiles.shape)}, must be [ceil(N / 16), ceil(K / 128), bytes]"
    )
    bits = tiles.shape[2] * 8 // (UNIT_N * UNIT_K)
    require(bits in (3, 4), f"{name}: tiles has {tiles.shape[2]} bytes a unit, must be 768 or 1024")
    product = PRODUCTS[f"w{bits}_dequantise_cublas"]
    limits = {"max_m": product.max_m, "max_n": MAX_INT - UNIT_N, "max_k": MAX_INT // 4}
    x = checked(name, bits, x, tiles, scales, n, group, bias, **limits)
    m = x.shape[0]
    out = torch.empty(m, n, dtype=torch.float16, device=x.device) if out is None else out
    expect(name, "out", out, torch.float16, (m, n), x.device)

    def unpack_rows(rows: slice, dense: torch.Tensor) -> None:
        part = slice(rows.start // UNIT_N, -(-rows.stop // UNIT_N))  # a slice begins with a tile
        unpack(tiles[part], scales[part], group, dense)

    return multiply_slices(x, bias, out, product, unpack_rows)


def unpack(tiles: torch.Tensor, scales: torch.Tensor, group: int, out: torch.Tensor) -> None:
    """Write the dense weight, out [rows, K], without a look at the operands. rows: of all tiles, or fewer in the last."""
    count, units, unit_bytes = tiles.shape
    op = OPS[f"w{unit_bytes * 8 // (UNIT_N * UNIT_K)}_dequantise_tiles"]
    rows, k = out.shape
    launch_op(op, (-(-count * units // WARPS),), (tiles, scales, out), rows, k, group.bit_length() - 1)
