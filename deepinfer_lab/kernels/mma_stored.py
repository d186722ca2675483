"""Launchers of the tensor-core kernels for a few rows, on weights as they are stored (`cuda/mma_stored.cuh`).

Arguments, results and errors as in `gemv.py`, but that `packed` must be 16-byte aligned. Made for M up to 32, right for any:
every 32 rows read the weights again. Weights are exact and sums float32, rounded once. A row's result is the same bits for
every M: neither the number of warps nor the order in which they add depends on it.
"""

import torch

from deepinfer_lab.kernels.catalogue import MAX_GRID_Y, PRODUCTS
from deepinfer_lab.kernels.check import Operands, check
from deepinfer_lab.kernels.loader import launch_op, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import MMA_ROWS, MMA_WARPS, OPS
from deepinfer_lab.kernels.ops_check import require

Maybe = torch.Tensor | None


def w4_mma_stored(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Four bits."""
    product = PRODUCTS["w4_mma_stored"]
    return _multiply(product.name, check(product, x, packed, scales, group, bias, out))


def w3_mma_stored(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits."""
    product = PRODUCTS["w3_mma_stored"]
    return _multiply(product.name, check(product, x, packed, scales, group, bias, out))


def warps_for(blocks: int, multiprocessors: int) -> int:
    """Warps of each block of 16 outputs, one of `MMA_WARPS`: many where there are few blocks, one to a multiprocessor."""
    few, many = MMA_WARPS
    return many if blocks <= multiprocessors else few


def _multiply(name: str, operands: Operands) -> torch.Tensor:
    o, block_n = operands, PRODUCTS[name].block_n
    address = o.packed.data_ptr()
    require(address % 16 == 0, f"{name}: packed starts at address {address:#x}, must be 16-byte aligned")
    require(o.n <= MAX_GRID_Y * block_n, f"{name}: N = {o.n}, must be 1 to {MAX_GRID_Y * block_n}")
    rows, blocks = next((rows for rows in MMA_ROWS if o.m <= rows), MMA_ROWS[-1]), -(-o.n // block_n)
    op = OPS[f"{name}_{rows}_{warps_for(blocks, multiprocessors(o.x.device.index))}"]
    # Blocks that read the same weights follow one another: the second finds them in the L2.
    grid = -(-o.m // rows), blocks
    launch_op(op, grid, (o.x, o.packed, o.scales, o.bias, o.out), o.m, o.n, o.k, o.group)
    return o.out
