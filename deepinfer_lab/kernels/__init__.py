"""CUDA kernels for few-bit weights, their compiler and their launchers. Importing this touches neither CuPy nor a GPU."""

from collections.abc import Callable
from types import MappingProxyType

import torch

from deepinfer_lab.kernels.dequantise import w3_dequantise_cublas, w4_dequantise_cublas
from deepinfer_lab.kernels.gemv import (
    w3_gemv,
    w3_gemv_batch_tile,
    w3_gemv_grid_y,
    w3_gemv_warp_tile,
    w4_gemv,
    w4_gemv_batch_tile,
)
from deepinfer_lab.kernels.loader import preload
from deepinfer_lab.kernels.mma_block import w3_mma_block, w4_mma_block
from deepinfer_lab.kernels.mma_small import w3_mma_small, w4_mma_small
from deepinfer_lab.kernels.tiled_gemm import (
    w3_tiled_gemm,
    w3_tiled_gemm_split_k,
    w4_tiled_gemm,
    w4_tiled_gemm_split_k,
)
from deepinfer_lab.kernels.wide import w3_wide, w4_wide

__all__ = [
    "LAUNCHERS",
    "TILED_LAUNCHERS",
    "preload",
    "w3_dequantise_cublas",
    "w3_gemv",
    "w3_gemv_batch_tile",
    "w3_gemv_grid_y",
    "w3_gemv_warp_tile",
    "w3_mma_block",
    "w3_mma_small",
    "w3_tiled_gemm",
    "w3_tiled_gemm_split_k",
    "w3_wide",
    "w4_dequantise_cublas",
    "w4_gemv",
    "w4_gemv_batch_tile",
    "w4_mma_block",
    "w4_mma_small",
    "w4_tiled_gemm",
    "w4_tiled_gemm_split_k",
    "w4_wide",
]

# Launcher by its name in `catalogue.PRODUCTS`: (x, packed, scales, group, bias=None, out=None) -> [M, N].
LAUNCHERS: MappingProxyType[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        launcher.__name__: launcher
        for launcher in (
            w4_gemv,
            w3_gemv,
            w4_gemv_batch_tile,
            w3_gemv_grid_y,
            w3_gemv_batch_tile,
            w3_gemv_warp_tile,
            w4_tiled_gemm,
            w3_tiled_gemm,
            w4_tiled_gemm_split_k,
            w3_tiled_gemm_split_k,
            w4_dequantise_cublas,
            w3_dequantise_cublas,
        )
    }
)

# The same for `catalogue.TILED`: (x, tiles, scales, n, group, bias=None, out=None) -> [M, N].
TILED_LAUNCHERS: MappingProxyType[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        launcher.__name__: launcher
        for launcher in (w4_mma_small, w3_mma_small, w4_mma_block, w3_mma_block, w4_wide, w3_wide)
    }
)
