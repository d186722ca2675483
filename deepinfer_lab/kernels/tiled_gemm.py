"""Launchers of the tiled matrix-matrix kernels: arguments, results and errors as in `gemv.py`.

Tile (article, section 2.2): BM = 32, BN = 64, BK = 32, 256 threads, 2 x 4 outputs a thread. Weights are unpacked to float16 in
shared memory, one tile at a time; products are added up in float32.

The article's design has one block for each 32 x 64 outputs. `*_split_k` lets up to eight blocks share them, each with a part of
K, for weights whose outputs are too few blocks to fill a card.
"""

import torch

from deepinfer_lab.kernels.catalogue import KERNELS
from deepinfer_lab.kernels.check import check
from deepinfer_lab.kernels.loader import launch, launch_split_k

Maybe = torch.Tensor | None


def w4_tiled_gemm(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Four bits, any M."""
    kernel = KERNELS["w4_tiled_gemm"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))


def w3_tiled_gemm(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits, any M."""
    kernel = KERNELS["w3_tiled_gemm"]
    return launch(kernel, check(kernel, x, packed, scales, group, bias, out))


def w4_tiled_gemm_split_k(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Four bits, any M; needs float32 [splits, M, N] of workspace, allocated by torch."""
    kernel = KERNELS["w4_tiled_gemm_split_k"]
    return launch_split_k(kernel, check(kernel, x, packed, scales, group, bias, out))


def w3_tiled_gemm_split_k(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int, bias: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Three bits, any M; needs float32 [splits, M, N] of workspace, allocated by torch."""
    kernel = KERNELS["w3_tiled_gemm_split_k"]
    return launch_split_k(kernel, check(kernel, x, packed, scales, group, bias, out))
