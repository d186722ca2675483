"""What a kernel can take. One check for all of them: a shape or dtype outside the limits is an error, never a wrong number."""

from dataclasses import dataclass

import torch

from deepinfer_lab.kernels.catalogue import DequantiseProduct, Kernel
from deepinfer_lab.kernels.ops_check import dense, fits, half_rows, refuse_gradient, require, whole_groups

MAX_INT = 2**31 - 1  # sizes and in-row offsets are 32-bit in the kernels; offsets across rows are 64-bit


@dataclass(frozen=True)
class Operands:
    """Tensors and sizes that passed the check; `x` is [M, K], contiguous and 16-byte aligned, `out` is [M, N]."""

    x: torch.Tensor
    packed: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    m: int
    n: int
    k: int
    group: int


def check(
    kernel: Kernel | DequantiseProduct,
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Operands:
    """Refuse what the kernel cannot take; make `x` dense and allocate `out` where needed (with torch's allocator).

    Args: as for the launchers (`gemv.py`, `tiled_gemm.py`).

    Raises:
        KernelError: naming the argument, its value and the limit.
    """
    name = kernel.name
    m, k = half_rows(name, x)
    require(packed.dim() == 2, f"{name}: packed has shape {tuple(packed.shape)}, must be [N, K * {kernel.bits} / 8]")
    n = packed.shape[0]
    require(1 <= m <= kernel.max_m, f"{name}: M = {m}, must be 1 to {kernel.max_m}")
    require(n >= 1, f"{name}: N = {n}, must be at least 1")
    whole_groups(name, k, group)
    # The last block of rows may reach past N, by less than a block.
    require(max(k, n + kernel.block_n) <= MAX_INT, f"{name}: N = {n}, K = {k}: must be below {MAX_INT}")
    fits(name, "packed", packed, torch.uint8, (n, k * kernel.bits // 8))
    fits(name, "scales", scales, torch.float16, (n, k // group))
    if bias is not None:
        fits(name, "bias", bias, torch.float16, (n,))
    if out is not None:
        fits(name, "out", out, torch.float16, (m, n))
    require(
        packed.data_ptr() % 4 == 0, f"{name}: packed starts at address {packed.data_ptr():#x}, must be 4-byte aligned"
    )
    refuse_gradient(name, x)
    require(x.is_cuda, f"{name}: x is on {x.device}, must be on a CUDA device")
    for label, tensor in (("packed", packed), ("scales", scales), ("bias", bias), ("out", out)):
        same = tensor is None or tensor.device == x.device
        require(same, f"{name}: {label} is on {tensor.device if tensor is not None else None}, x is on {x.device}")

    x = dense(x)
    if out is None:
        out = torch.empty((m, n), dtype=torch.float16, device=x.device)
    return Operands(x, packed, scales, bias, out, m, n, k, group)
