"""How fast this machine reads memory: the roofline under every decode step."""

import time

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
    best = float("inf")
    for _ in range(repeats + 1):  # the first touches the pages
        best = min(best, _cuda_seconds(buffer) if device.type == "cuda" else _host_seconds(buffer))
    return nbytes / best


def _host_seconds(buffer: torch.Tensor) -> float:
    started = time.perf_counter()
    buffer.sum()
    return time.perf_counter() - started


def _cuda_seconds(buffer: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    buffer.sum()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
