"""What kernels can take: an argument outside the limits is an error, never a wrong number."""

import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.catalogue import GROUPS


def require(condition: bool, message: str) -> None:
    if not condition:
        raise KernelError(message)


def fits(op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The tensor must have this dtype and shape, and be contiguous: to copy weights on every call would hide a cost."""
    require(tensor.dtype == dtype, f"{op}: {name} has dtype {tensor.dtype}, must be {dtype}")
    require(tuple(tensor.shape) == shape, f"{op}: {name} has shape {tuple(tensor.shape)}, must be {shape}")
    require(tensor.is_contiguous(), f"{op}: {name} has strides {tensor.stride()}, must be contiguous")


def half_rows(op: str, x: torch.Tensor) -> tuple[int, int]:
    """M and K of activations, which must be float16 [M, K]."""
    require(x.dtype == torch.float16, f"{op}: x has dtype {x.dtype}, must be torch.float16")
    require(x.dim() == 2, f"{op}: x has shape {tuple(x.shape)}, must be [M, K]")
    return x.shape


def known_group(op: str, group: int) -> None:
    require(group in GROUPS, f"{op}: group = {group}, must be one of {', '.join(map(str, GROUPS))}")


def whole_groups(op: str, k: int, group: int) -> None:
    """A group that kernels know, of which K is a multiple."""
    known_group(op, group)
    require(k > 0 and k % group == 0, f"{op}: K = {k}, must be a positive multiple of group = {group}")


def refuse_gradient(op: str, x: torch.Tensor) -> None:
    require(
        not (torch.is_grad_enabled() and x.requires_grad),
        f"{op}: x requires a gradient and this kernel has no backward pass; call it under torch.inference_mode()",
    )


def dense(x: torch.Tensor) -> torch.Tensor:
    """Activations, which are small, contiguous and on a 16-byte boundary: copied where they are not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def expect(
    op: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    aligned: bool = False,
) -> None:
    """`fits`, and the tensor must lie on this device and, if `aligned`, on a 16-byte boundary."""
    fits(op, name, tensor, dtype, shape)
    address = tensor.data_ptr()
    require(not aligned or address % 16 == 0, f"{op}: {name} starts at address {address:#x}, must be 16-byte aligned")
    require(tensor.is_cuda, f"{op}: {name} is on {tensor.device}, must be on a CUDA device")
    require(tensor.device == device, f"{op}: {name} is on {tensor.device}, must be on {device}")
