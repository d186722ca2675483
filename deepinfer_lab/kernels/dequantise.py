"""Packed weights to dense float16, and products that cuBLAS computes from them: the way for many rows, where tensor cores gain
more than it costs to write the weight once.

All is enqueued on torch's current stream and nothing is kept between calls: dense slices come from torch's allocator, which
hands their memory out again in stream order, also under CUDA-graph capture.
"""

from collections.abc import Callable

import numpy as np
import torch

from deepinfer_lab.kernels.catalogue import PRODUCTS, DequantiseProduct
from deepinfer_lab.kernels.check import Operands, check
from deepinfer_lab.kernels.loader import launch_op
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, known_group, require

Maybe = torch.Tensor | None
UNIT = 8  # values that a thread unpacks at a time
BLOCK = 512  # units of a thread block: cuda/dequantise.cuh


def dequantise(
    packed: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    group: int,
    rows: slice = slice(None),
    out: Maybe = None,
) -> torch.Tensor:
    """Rows of a packed weight as dense float16 [rows, K], the same bits as `PackedWeight.dequantise(torch.float16, rows)`.

    Args:
        packed: uint8 [N, K * bits / 8] on a CUDA device, contiguous. scales: float16 [N, K / group], contiguous.
        bits: 3 or 4. group: 32, 64 or 128. rows: of the weight, with a step of 1; what lies beyond N is left out.
        out: float16 [rows, K], contiguous and 16-byte aligned, to write into; None allocates it.

    Raises:
        KernelError: a shape, dtype, layout or device outside these limits.
    """
    require(bits in (3, 4), f"dequantise: bits = {bits}, must be 3 or 4")
    name = f"w{bits}_dequantise"
    known_group(name, group)
    require(scales.dim() == 2, f"{name}: scales has shape {tuple(scales.shape)}, must be [N, K / {group}]")
    n, k = scales.shape[0], scales.shape[1] * group
    require(k > 0, f"{name}: K = 0, must be a positive multiple of group = {group}")
    start, stop, step = rows.indices(n)
    require(step == 1, f"{name}: rows has a step of {step}, must be 1")
    address = packed.data_ptr()
    require(address % 4 == 0, f"{name}: packed starts at address {address:#x}, must be 4-byte aligned")
    expect(name, "packed", packed, torch.uint8, (n, k * bits // 8), packed.device)
    expect(name, "scales", scales, torch.float16, (n, k // group), packed.device)
    count = max(stop - start, 0)
    out = torch.empty(count, k, dtype=torch.float16, device=packed.device) if out is None else out
    expect(name, "out", out, torch.float16, (count, k), packed.device, aligned=True)
    if count:
        _unpack(bits, packed[start:stop], scales[start:stop], group, out)
    return out


def w4_dequantise_cublas(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Four bits, any M: slices of the weight are made dense, then multiplied. Arguments, results and errors as in `gemv.py`,
    but that a row's result may depend on how many rows share the launch: cuBLAS chooses its algorithm by shape.
    """
    product = PRODUCTS["w4_dequantise_cublas"]
    return _multiply(product, check(product, x, packed, scales, group, bias, out))


def w3_dequantise_cublas(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits, any M; as `w4_dequantise_cublas` otherwise."""
    product = PRODUCTS["w3_dequantise_cublas"]
    return _multiply(product, check(product, x, packed, scales, group, bias, out))


def _multiply(product: DequantiseProduct, operands: Operands) -> torch.Tensor:
    o = operands

    def unpack(rows: slice, dense: torch.Tensor) -> None:
        _unpack(product.bits, o.packed[rows], o.scales[rows], o.group, dense)

    return multiply_slices(o.x, o.bias, o.out, product, unpack)


def multiply_slices(
    x: torch.Tensor,
    bias: Maybe,
    out: torch.Tensor,
    product: DequantiseProduct,
    unpack: Callable[[slice, torch.Tensor], None],
) -> torch.Tensor:
    """out [M, N] = x [M, K] @ weight.T + bias, of which `unpack` writes the given rows of the weight [rows, K] at a time.

    Each slice's product goes where it belongs: torch gives cuBLAS the stride of `out`'s rows, and copies nothing.
    """
    n, k = out.shape[1], x.shape[1]
    step = min(product.slice_rows(k), n)
    workspace = torch.empty(step, k, dtype=torch.float16, device=x.device)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        dense = workspace[: rows.stop - start]
        unpack(rows, dense)
        if bias is None:
            torch.mm(x, dense.T, out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, dense.T, out=out[:, rows])
    return out


def _unpack(bits: int, packed: torch.Tensor, scales: torch.Tensor, group: int, out: torch.Tensor) -> None:
    """Enqueue the kernel on tensors that are known to be right."""
    units = out.numel() // UNIT
    launch_op(OPS[f"w{bits}_dequantise"], (-(-units // BLOCK),), (packed, scales, out), np.int64(units), group)
