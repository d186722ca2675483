"""What the kernels of `ops_catalogue` can take: an argument outside the limits is an error, never a wrong number."""

import torch

from deepinfer_lab.errors import KernelError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise KernelError(message)


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
    """The tensor must have this dtype and shape, lie contiguously on this device and, if `aligned`, on a 16-byte boundary."""
    require(tensor.dtype == dtype, f"{op}: {name} has dtype {tensor.dtype}, must be {dtype}")
    require(tuple(tensor.shape) == shape, f"{op}: {name} has shape {tuple(tensor.shape)}, must be {shape}")
    require(tensor.is_contiguous(), f"{op}: {name} has strides {tensor.stride()}, must be contiguous")
    address = tensor.data_ptr()
    require(not aligned or address % 16 == 0, f"{op}: {name} starts at address {address:#x}, must be 16-byte aligned")
    require(tensor.is_cuda, f"{op}: {name} is on {tensor.device}, must be on a CUDA device")
    require(tensor.device == device, f"{op}: {name} is on {tensor.device}, must be on {device}")
