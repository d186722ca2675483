"""How fast this machine reads memory and multiplies matrices: the two lines of a roofline."""

import time
from collections.abc import Callable

import torch


def read_bandwidth(device: torch.device, nbytes: int = 256 << 20, repeats: int = 9) -> float:
    """Measured read bandwidth in bytes per second: the best of several sums over a buffer far larger than any cache.

    The best, not the median: a roofline is what the memory can do, and interference only ever slows it down.

    Args:
        nbytes: size of the buffer; on a GPU at least 2 GiB are used, since 256 MiB would take mere microseconds.
    """
    if device.type == "cuda":
        nbytes = max(nbytes, 2 << 30)
    buffer = torch.ones(nbytes // 4, device=device)
    return nbytes / min(_seconds(buffer.sum, device) for _ in range(repeats + 1))  # the first touches the pages


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 9) -> float:
    """Measured FLOPs per second of a square matrix product, a multiply-add being two: the best of several, as above.

    Args:
        size: of both matrices, 8192 on a GPU and 1024 on a CPU. Values are random: with zeros a GPU would draw less power and
            clock higher.
    """
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(_seconds(lambda: a @ b, device) for _ in range(repeats + 1))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
