"""Launches that CuPy cannot ask for: programmatic dependent launch, cooperative launch, and clusters of blocks.

Programmatic dependent launch: a kernel's blocks take their places while those of the kernel before it still run. A stream
otherwise starts a kernel when the one before it is done and has written everything back, about a microsecond during which the
device does nothing; a decode step is some two hundred small kernels. CUDA Programming Guide, "Programmatic Dependent Launch and
Synchronization".

Cooperative launch: all blocks are resident at once, so that they may wait for one another.

Clusters: neighbouring blocks that run at the same time and read one another's shared memory; of up to 8 on any device that has
them. CUDA Programming Guide, "Thread Block Clusters". Layouts of the structures as in cuda.h.
"""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from deepinfer_lab.errors import KernelError

MIN_CAPABILITY = (9, 0)
MAX_CLUSTER = 8
ANY_CLUSTERS = 1024  # of a grid of which the driver is only asked how many clusters of it run at once
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6  # CU_LAUNCH_ATTRIBUTE_...


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a union of 64, of which these use an int, or three."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 3), ("rest", ctypes.c_char * 52))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The CUDA driver, from 11.8 on; None where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        return driver if hasattr(driver, "cuLaunchKernelEx") else None
    return None


def available(capability: tuple[int, int]) -> bool:
    """Whether the installed driver and a device of this compute capability can do it."""
    return capability >= MIN_CAPABILITY and _driver() is not None


def launch(
    function: int,
    grid: tuple[int, ...],
    threads: int,
    shared: int,
    stream: int,
    arguments: Sequence[np.number],
    *,
    dependent: bool = False,
    together: bool = False,
    cluster: int = 1,
) -> None:
    """Enqueue a kernel.

    Args:
        function, stream: CUfunction and CUstream, of the current context. shared: bytes of shared memory beyond what the
            kernel declares.
        dependent: it awaits those before it by itself (`await_previous` in cuda/dependent.cuh).
        together: its blocks wait for one another: the launch fails if not all of them fit.
        cluster: blocks of a cluster, along the grid's x.

    Raises:
        KernelError: the driver refuses, with its number.
    """
    held = [np.array(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(held))(*[each.ctypes.data for each in held])
    attributes = [(PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0))] * dependent + [(COOPERATIVE, (1, 0, 0))] * together
    config = _config(grid, threads, shared, stream, attributes, cluster)
    status = _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
    if status:
        raise KernelError(f"cuLaunchKernelEx: CUDA error {status}, grid {grid}, clusters of {cluster}")


def active_clusters(function: int, threads: int, shared: int, cluster: int) -> int:
    """Clusters of so many blocks that the current context's device holds at once; 0 where the driver cannot tell."""
    count = ctypes.c_int()
    config = _config((cluster * ANY_CLUSTERS,), threads, shared, 0, [], cluster)
    status = _driver().cuOccupancyMaxActiveClusters(
        ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config)
    )
    return 0 if status else count.value


def _config(
    grid: tuple[int, ...],
    threads: int,
    shared: int,
    stream: int,
    wanted: list[tuple[int, tuple[int, int, int]]],
    cluster: int,
) -> _Config:
    """It keeps its attributes alive."""
    wanted = [(CLUSTER_DIMENSION, (cluster, 1, 1))] * (cluster > 1) + wanted
    attributes = (_Attribute * len(wanted))(*[_Attribute(which, 0, value) for which, value in wanted])
    return _Config((*grid, 1, 1)[:3], (threads, 1, 1), shared, stream, attributes, len(wanted))
