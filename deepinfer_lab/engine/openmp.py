"""Keeping torch's OpenMP threads out of each other's way on a CPU."""

import ctypes
from pathlib import Path

import torch

_HARD = 2  # omp_pause_hard, OpenMP 5.0 section 3.2.44


def release_thread_pool() -> None:
    """Let go of the OpenMP workers that belong to the calling thread, until it computes again.

    libgomp keeps a pool for every thread that has ever computed. Once the pools together outnumber the cores, workers stop
    spinning between operators and sleep instead, which makes a decode step about a third slower. A thread that hands
    its work to another therefore gives up its own pool. Does nothing where torch brings another OpenMP runtime.
    """
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        ctypes.CDLL(str(library)).omp_pause_resource_all(_HARD)
