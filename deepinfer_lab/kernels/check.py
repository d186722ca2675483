"""What a kernel can take. One check for all of them: a shape or dtype outside the limits is an error, never a wrong number."""

from dataclasses import dataclass

import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.catalogue import GROUPS, DequantiseProduct, Kernel

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


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise KernelError(message)


def _tensor(
    kernel: Kernel | DequantiseProduct, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Weights, scales, bias and out are used as they lie: copying them on every call would hide a cost."""
    _require(tensor.dtype == dtype, f"{kernel.name}: {name} has dtype {tensor.dtype}, must be {dtype}")
    found = tuple(tensor.shape)
    _require(found == shape, f"{kernel.name}: {name} has shape {found}, must be {shape}")
    _require(tensor.is_contiguous(), f"{kernel.name}: {name} has strides {tensor.stride()}, must be contiguous")


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
    _require(x.dtype == torch.float16, f"{name}: x has dtype {x.dtype}, must be torch.float16")
    _require(x.dim() == 2, f"{name}: x has shape {tuple(x.shape)}, must be [M, K]")
    _require(packed.dim() == 2, f"{name}: packed has shape {tuple(packed.shape)}, must be [N, K * {kernel.bits} / 8]")
    (m, k), n = x.shape, packed.shape[0]
    _require(1 <= m <= kernel.max_m, f"{name}: M = {m}, must be 1 to {kernel.max_m}")
    _require(n >= 1, f"{name}: N = {n}, must be at least 1")
    _require(group in GROUPS, f"{name}: group = {group}, must be one of {', '.join(map(str, GROUPS))}")
    _require(k > 0 and k % group == 0, f"{name}: K = {k}, must be a positive multiple of group = {group}")
    # The last block of rows may reach past N, by less than a block.
    _require(max(k, n + kernel.block_n) <= MAX_INT, f"{name}: N = {n}, K = {k}: must be below {MAX_INT}")
    _tensor(kernel, "packed", packed, torch.uint8, (n, k * kernel.bits // 8))
    _tensor(kernel, "scales", scales, torch.float16, (n, k // group))
    if bias is not None:
        _tensor(kernel, "bias", bias, torch.float16, (n,))
    if out is not None:
        _tensor(kernel, "out", out, torch.float16, (m, n))
    _require(
        packed.data_ptr() % 4 == 0, f"{name}: packed starts at address {packed.data_ptr():#x}, must be 4-byte aligned"
    )
    _require(
        not (torch.is_grad_enabled() and x.requires_grad),
        f"{name}: x requires a gradient and this kernel has no backward pass; call it under torch.inference_mode()",
    )
    _require(x.is_cuda, f"{name}: x is on {x.device}, must be on a CUDA device")
    for label, tensor in (("packed", packed), ("scales", scales), ("bias", bias), ("out", out)):
        same = tensor is None or tensor.device == x.device
        _require(same, f"{name}: {label} is on {tensor.device if tensor is not None else None}, x is on {x.device}")

    x = x.contiguous()
    if x.data_ptr() % 16:  # a view into the middle of a buffer; activations are small, weights would be refused
        x = x.clone()
    if out is None:
        out = torch.empty((m, n), dtype=torch.float16, device=x.device)
    return Operands(x, packed, scales, bias, out, m, n, k, group)
