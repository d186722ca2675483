"""Compiled kernels on a device, and their launch on torch's current stream."""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import dependent_launch
from deepinfer_lab.kernels.catalogue import ADD_PARTIALS, KERNELS, Kernel
from deepinfer_lab.kernels.check import Operands
from deepinfer_lab.kernels.compiler import arch_for, compile_all, compile_kernel
from deepinfer_lab.kernels.counters import counters
from deepinfer_lab.kernels.ops_catalogue import MIN_CAPABILITY, OPS, Op, runs_on

RESERVED_SHARED = (
    1024  # bytes, of each block: CUDA C++ Programming Guide, "Shared Memory" of compute capability 8.x and later
)


class Loader:
    """The kernels of one device, compiled and loaded when first asked for. Safe to share between threads."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._functions: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def function(self, kernel: str, entry: str | None = None) -> Any:
        """The CuPy function of a kernel, or the function called `entry` in the same source.

        Raises:
            KernelError: the kernel does not compile for this device, or it is first asked for during graph capture, when
                a module cannot be loaded.
        """
        key = kernel, entry or kernel
        found = self._functions.get(key)
        if found is None:
            with self._lock, torch.cuda.device(self.device):
                # The function keeps its module alive.
                found = self._functions.get(key) or self._load(kernel, key[1])
                self._functions[key] = found
        return found

    def _load(self, kernel: str, entry: str) -> Any:
        function = self._module(kernel).get_function(entry)
        if kernel in OPS and OPS[kernel].shared:
            from cupy_backends.cuda.api import driver

            declared = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
            limit = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES  # 48 KiB unless it is asked for
            driver.funcSetAttribute(function.ptr, limit, max_shared(self.device) - declared)
        return function

    def _module(self, kernel: str) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"{kernel} is not loaded and a CUDA graph is being captured; call kernels.preload() first"
            )
        from cupy.cuda.function import Module

        module = Module()
        module.load(compile_kernel(kernel, arch_for(torch.cuda.get_device_capability(self.device))).cubin)
        return module


@functools.cache
def loader(device: int) -> Loader:
    """The one `Loader` of a device."""
    return Loader(device)


def preload(device: torch.device | str = "cuda") -> None:
    """Compile and load every kernel, so that no later call does: before capturing CUDA graphs, or before timing."""
    index = torch.device(device).index
    kernels = loader(torch.cuda.current_device() if index is None else index)
    capability = torch.cuda.get_device_capability(kernels.device)
    arch = arch_for(capability)
    ops = [name for name, op in OPS.items() if capability >= MIN_CAPABILITY and runs_on(op, arch)]
    compile_all((name, arch) for name in (*KERNELS, *ops))  # loading then finds them in the cache
    for kernel in KERNELS.values():
        kernels.function(kernel.name)
        if kernel.split_k:
            kernels.function(kernel.name, ADD_PARTIALS)
    for name in ops:
        kernels.function(name)
    if ops:
        counters(kernels.device).reserve()


@dataclass(frozen=True)
class _TorchStream:
    """One of torch's streams, in the CUDA stream protocol: CuPy launches on it and owns nothing."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer  # version of the protocol, cudaStream_t


@functools.cache
def _cupy_stream(pointer: int) -> Any:
    """Kept for good, as torch keeps its pool of streams."""
    import cupy

    return cupy.cuda.Stream.from_external(_TorchStream(pointer))


def _enqueue(
    function: Any,
    grid: tuple[int, ...],
    threads: int,
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[int | np.number],
    *,
    shared: int = 0,
    dependent: bool = False,
    together: bool = False,
    cluster: int = 1,
) -> None:
    """`dependent`: the kernel awaits those before it by itself. Only captured steps make use of it. `together`: its blocks
    wait for one another. cluster: its blocks."""
    device = tensors[0].device
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    scalars = [number if isinstance(number, np.number) else np.int32(number) for number in numbers]
    arguments = (*map(np.uint64, pointers), *scalars)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        dependent = dependent and torch.cuda.is_current_stream_capturing() and _can_depend(device.index)
        if dependent or together or cluster > 1:
            flags = {"dependent": dependent, "together": together, "cluster": cluster}
            dependent_launch.launch(function.ptr, grid, threads, shared, stream, arguments, **flags)
        else:
            function(grid, (threads,), arguments, shared_mem=shared, stream=_cupy_stream(stream))


@functools.cache
def _can_depend(device: int) -> bool:
    return dependent_launch.available(torch.cuda.get_device_capability(device))


def launch(kernel: Kernel, operands: Operands) -> torch.Tensor:
    """Enqueue the kernel on torch's current stream of the operands' device, without waiting for it.

    Memory safety is torch's usual: tensors used on a stream other than the one they were allocated on need `record_stream`.

    Returns:
        operands.out.
    """
    o = operands
    function = loader(o.x.device.index).function(kernel.name)
    tensors = (o.x, o.packed, o.scales, o.bias, o.out)
    _enqueue(function, kernel.grid(o.m, o.n), kernel.threads, tensors, (o.m, o.n, o.k, o.group))
    return o.out


def launch_op(
    op: Op,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    *numbers: int | np.number,
    shared: int = 0,
    cluster: int = 1,
) -> None:
    """Enqueue a kernel of `ops_catalogue`: pointers first (null for None), then numbers, int32 unless of another NumPy type.

    The first tensor says on which device. shared: bytes of shared memory beyond what the kernel declares. cluster: blocks of a
    cluster, along the grid's x, one of `held_clusters`.
    """
    function = loader(tensors[0].device.index).function(op.name)
    flags = {"dependent": op.dependent, "together": op.together, "cluster": cluster}
    _enqueue(function, grid, op.threads, tensors, numbers, shared=shared, **flags)


def held_clusters(op: Op, shared: int, device: int) -> dict[int, int]:
    """Clusters that the device holds at once of a kernel of which a multiprocessor holds one block: by the number of their
    blocks, 1 and what else it can have."""
    held = {1: multiprocessors(device)}
    if not _can_depend(device):
        return held
    function = loader(device).function(op.name)
    with torch.cuda.device(device):
        for blocks in range(2, dependent_launch.MAX_CLUSTER + 1):
            count = dependent_launch.active_clusters(function.ptr, op.threads, shared, blocks)
            held |= {blocks: count} if count else {}
    return held


def launch_split_k(kernel: Kernel, operands: Operands) -> torch.Tensor:
    """Enqueue a kernel that splits K, and the launch that adds its partial sums. As `launch` otherwise."""
    o = operands
    kernels = loader(o.x.device.index)
    splits = kernel.splits(o.n, o.k, multiprocessors(o.x.device.index))
    partial = torch.empty(splits, o.m, o.n, dtype=torch.float32, device=o.x.device)
    tensors = (o.x, o.packed, o.scales, None, partial)
    grid = (*kernel.grid(o.m, o.n), splits)
    _enqueue(kernels.function(kernel.name), grid, kernel.threads, tensors, (o.m, o.n, o.k, o.group))
    add = kernels.function(kernel.name, ADD_PARTIALS)
    _enqueue(add, (-(-o.n // kernel.threads), o.m), kernel.threads, (partial, o.bias, o.out), (o.m, o.n, splits))
    return o.out


@functools.cache
def multiprocessors(device: int) -> int:
    """How many the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def max_shared(device: int) -> int:
    """Bytes of shared memory that one block may have: all of a multiprocessor's but what each block loses to the system."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - RESERVED_SHARED
