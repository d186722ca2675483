"""Launchers of the matrix-vector kernels. All compute out[m, n] = sum_k x[m, k] * q[n, k] * scales[n, k // group] + bias[n].

Common arguments:
    x: float16 [M, K] on a CUDA device. Copied where it is not contiguous or not 16-byte aligned.
    packed: uint8 [N, K * bits / 8], contiguous (layouts: `quant/layout.py`). scales: float16 [N, K / group], contiguous.
    group: 32, 64 or 128, a divisor of K. bias: float16 [N], or None.
    out: float16 [M, N], contiguous, to write into; None allocates it.

All return float16 [M, N], accumulated in float32 and rounded once, written by torch's current stream. A row's result is the
same bits, however many rows share the launch, for all kernels here but `w3_gemv_batch_tile`, which adds in another order.

All raise KernelError for a shape, dtype, layout or device outside these limits.
"""

import torch

from deepinfer_lab.kernels.catalogue import KERNELS
from deepinfer_lab.kernels.check import check
from deepinfer_lab.kernels.loader import launch

Maybe = torch.Tensor | None


def w4_gemv(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Four bits, M = 1."""
    kernel = KERNELS["w4_gemv"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))


def w3_gemv(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits, M = 1."""
    kernel = KERNELS["w3_gemv"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))


def w4_gemv_batch_tile(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Four bits; every eight rows share one read of the weights."""
    kernel = KERNELS["w4_gemv_batch_tile"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))


def w3_gemv_grid_y(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits; `grid.y = M`, every row reads the weights again."""
    kernel = KERNELS["w3_gemv_grid_y"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))


def w3_gemv_batch_tile(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits, the article's failed experiment (section 3): a block keeps eight groups of accumulators."""
    kernel = KERNELS["w3_gemv_batch_tile"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))


def w3_gemv_warp_tile(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits; every eight rows share one read of the weights, in the layout of `w4_gemv_batch_tile`."""
    kernel = KERNELS["w3_gemv_warp_tile"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))
