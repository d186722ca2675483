"""A GPU made of torch on the CPU, with a clock that only launches move."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from deepinfer_lab.quant.layout import PackedWeight

BANDWIDTH = 1e9


@dataclass
class TorchGpu:
    """A `kernel_timing.Gpu` on the CPU; launches move `now`, in microseconds, and say which copy they read."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    l2_bytes: int = 4096
    now: float = 0.0
    launched: list[int] = field(default_factory=list)

    def read_bandwidth(self) -> float:
        return BANDWIDTH

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        work()
        return lambda: work() and None

    def time(self, run: Callable[[], object], count: int) -> list[float]:
        marks = [self.now]
        for _ in range(count):
            run()
            self.now += 1e-3  # so that no sample is zero, whatever ran
            marks.append(self.now)
        return [end - begin for begin, end in pairwise(marks)]

    def launch(self, cost_us: float) -> Callable[[int], None]:
        def run(copy: int) -> None:
            self.launched.append(copy)
            self.now += cost_us

        return run


def torch_launcher(gpu: TorchGpu, bits: int, cost_us: Callable[[int], float], factor: float = 1.0):
    """A launcher that computes with torch, at `cost_us(M)` of the GPU's time."""

    def run(x, packed, scales, group, bias=None, out=None):
        gpu.now += cost_us(x.shape[0])
        weight = PackedWeight(bits, group, packed.shape[0], x.shape[1], packed, scales)
        return out.copy_(factor * (x.float() @ weight.dequantise(torch.float32).T))

    return run


def torch_fallback(gpu: TorchGpu, cost_us: float):
    """`dequant_cublas`, likewise."""

    def run(x, weight):
        gpu.now += cost_us
        return (x.float() @ weight.dequantise(torch.float32).T).to(x.dtype)

    return run
