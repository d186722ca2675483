"""Compiled kernels on a device, and their launch on torch's current stream."""

import functools
import threading
from typing import Any

import numpy as np
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.catalogue import KERNELS, Kernel
from deepinfer_lab.kernels.check import Operands
from deepinfer_lab.kernels.compiler import arch_for, compile_kernel


class Loader:
    """The kernels of one device, compiled and loaded when first asked for. Safe to share between threads."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._functions: dict[str, Any] = {}
        self._lock = threading.Lock()

    def function(self, name: str) -> Any:
        """The CuPy function of a kernel.

        Raises:
            KernelError: the kernel does not compile for this device, or it is first asked for during graph capture, when
                a module cannot be loaded.
        """
        found = self._functions.get(name)
        if found is None:
            with self._lock, torch.cuda.device(self.device):
                found = self._functions.get(name) or self._load(name)
                self._functions[name] = found
        return found

    def _load(self, name: str) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise KernelError(f"{name} is not loaded and a CUDA graph is being captured; call kernels.preload() before")
        from cupy.cuda.function import Module

        arch = arch_for(torch.cuda.get_device_capability(self.device))
        module = Module()
        module.load(compile_kernel(name, arch).cubin)
        return module.get_function(name)  # it keeps the module alive


@functools.cache
def loader(device: int) -> Loader:
    """The one `Loader` of a device."""
    return Loader(device)


def preload(device: torch.device | str = "cuda") -> None:
    """Compile and load every kernel, so that no later call does: before capturing CUDA graphs, or before timing."""
    index = torch.device(device).index
    kernels = loader(torch.cuda.current_device() if index is None else index)
    for name in KERNELS:
        kernels.function(name)


@functools.cache
def _external_stream(pointer: int) -> Any:
    """CuPy's view of one of torch's streams; it owns nothing, and torch keeps its pool of streams to the end."""
    import cupy

    return cupy.cuda.ExternalStream(pointer)


def launch(kernel: Kernel, operands: Operands) -> torch.Tensor:
    """Enqueue the kernel on torch's current stream of the operands' device, without waiting for it.

    Memory safety is torch's usual: tensors used on a stream other than the one they were allocated on need `record_stream`.

    Returns:
        operands.out.
    """
    o = operands
    device = o.x.device
    function = loader(device.index).function(kernel.name)
    pointers = [tensor.data_ptr() if tensor is not None else 0 for tensor in (o.x, o.packed, o.scales, o.bias, o.out)]
    sizes = [o.m, o.n, o.k, o.group]
    arguments = (*map(np.uint64, pointers), *map(np.int32, sizes))
    with torch.cuda.device(device):
        stream = _external_stream(torch.cuda.current_stream(device).cuda_stream)
        function(kernel.grid(o.m, o.n), (kernel.threads,), arguments, stream=stream)
    return o.out
