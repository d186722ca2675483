"""Launches that CuPy cannot ask for: programmatic dependent ones, where a kernel's blocks take their places while those of
the kernel before it still run; and cooperative ones, of which all blocks are resident at once.

A stream otherwise starts a kernel when the one before it is done and has written everything back, about a microsecond during
which the device does nothing; a decode step is some 400 small kernels. CUDA Programming Guide, "Programmatic Dependent Launch
and Synchronization"; layouts of the structures as in cuda.h.
"""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from deepinfer_lab.errors import KernelError

MIN_CAPABILITY = (9, 0)
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_...


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padded to 8 bytes, and a union of 64, of which this one uses an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


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
    attribute: int = PROGRAMMATIC_STREAM_SERIALIZATION,
) -> None:
    """Enqueue a kernel that awaits those before it by itself (`await_previous` in cuda/dependent.cuh).

    Args:
        function, stream: CUfunction and CUstream, of the current context. shared: bytes of shared memory beyond what the
            kernel declares.
        attribute: `COOPERATIVE` starts it as usual, when those before it are done, but fails if not all of its blocks fit.

    Raises:
        KernelError: the driver refuses, with its number.
    """
    held = [np.array(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(held))(*[each.ctypes.data for each in held])
    chosen = _Attribute(attribute, 0, 1)
    config = _Config((*grid, 1, 1)[:3], (threads, 1, 1), shared, stream, ctypes.pointer(chosen), 1)
    status = _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
    if status:
        raise KernelError(f"cuLaunchKernelEx: CUDA error {status}")
