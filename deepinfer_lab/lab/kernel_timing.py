"""How long one launch takes, by two methods that answer different questions.

`graph_cold`: what the GPU needs when nothing is cached. A CUDA graph launches the kernel once on each of several copies of the
    weights, which together exceed the L2 four times over, so that every launch reads memory; one replay's time over the number
    of launches is a sample. Replays are queued back to back: the CPU's share (Python, checks, launch) is hidden.
`article`: the DeepInfer-SM86 article's method, section 2.7: warm up 3 times, then 20 launches of the same weights, whose mean
    it reports. The L2 is warm, and whatever the CPU cannot launch ahead of the GPU counts.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

from deepinfer_lab import kernels
from deepinfer_lab.errors import SettingError
from deepinfer_lab.metrics.bandwidth import read_bandwidth

GRAPH_COLD, ARTICLE = "graph_cold", "article"
WARM_UP = 3
ARTICLE_LAUNCHES = 20  # section 2.7
MIN_REPLAYS = 20
REST_S = 1.0  # a row of W4 took an H200 25 us right after a second of dense products, and 21 after such a rest
L2_MULTIPLE = 4  # of the L2's size, which the weights of one graph must exceed


class Gpu(Protocol):
    """What timing needs of a device. Tests put a clock of their own behind it."""

    device: torch.device
    l2_bytes: int

    def read_bandwidth(self) -> float:
        """Measured, in bytes per second."""
        ...

    def rest(self) -> None:
        """Wait until a clock that the card's power limit has lowered is as it was."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Run `work` once, then record it; the result replays it without waiting."""
        ...

    def time(self, run: Callable[[], object], count: int) -> list[float]:
        """Call `run` so many times in a row; the time from each one's start to the next one's, in microseconds."""
        ...


class CudaGpu:
    """The current CUDA device, with every kernel loaded."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._side = torch.cuda.Stream(self.device)  # capture is not allowed on the default stream
        kernels.preload(self.device)

    def read_bandwidth(self) -> float:
        return read_bandwidth(self.device)

    def rest(self) -> None:
        torch.cuda.synchronize(self.device)
        time.sleep(REST_S)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            work()  # cuBLAS sets itself up for this stream now, not under capture
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._side):
            work()
        return graph.replay

    def time(self, run: Callable[[], object], count: int) -> list[float]:
        """One CUDA event between two runs, so that nothing that passes between them is left out."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        marks[-1].synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(marks)]


def copies_for(l2_bytes: int, nbytes: int) -> int:
    """Copies of weights of `nbytes` that together exceed four times the L2; two at least, so that no launch follows itself."""
    return max(2, L2_MULTIPLE * l2_bytes // nbytes + 1)


def graph_cold(gpu: Gpu, launch: Callable[[int], object], copies: int, replays: int = MIN_REPLAYS) -> list[float]:
    """Raw samples in microseconds per launch, one a replay; their median is the figure to quote.

    Args:
        launch: enqueues the kernel on the given copy of the weights, 0 to copies - 1.
        replays: samples to take.

    Raises:
        SettingError: fewer than 20 replays.
    """
    if replays < MIN_REPLAYS:
        raise SettingError(f"replays = {replays}: a median needs {MIN_REPLAYS} at least")

    def all_copies() -> None:
        for copy in range(copies):
            launch(copy)

    replay = gpu.capture(all_copies)
    for _ in range(WARM_UP):
        replay()
    return [microseconds / copies for microseconds in gpu.time(replay, replays)]


def article(gpu: Gpu, launch: Callable[[int], object]) -> list[float]:
    """Raw samples in microseconds, one a launch, all on copy 0; their mean is the article's figure."""
    for _ in range(WARM_UP):
        launch(0)
    return gpu.time(lambda: launch(0), ARTICLE_LAUNCHES)
