"""A GPU made of torch on the CPU, with a clock that only launches move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

import pytest
import torch

from deepinfer_lab.kernels import LAUNCHERS, TILED_LAUNCHERS
from deepinfer_lab.kernels.catalogue import PRODUCTS, TILED
from deepinfer_lab.lab import kernel_cells as cells
from deepinfer_lab.quant.layout import PackedWeight
from deepinfer_lab.quant.tiles import TiledWeight, from_tiles

BANDWIDTH = 1e9


@dataclass
class TorchGpu:
    """A `kernel_timing.Gpu` on the CPU; launches move `now`, in microseconds, and say which copy they read."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    l2_bytes: int = 4096
    now: float = 0.0
    rests: int = 0
    launched: list[int] = field(default_factory=list)

    def read_bandwidth(self) -> float:
        return BANDWIDTH

    def rest(self) -> None:
        self.rests += 1

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


def use_torch(
    monkeypatch: pytest.MonkeyPatch,
    gpu: TorchGpu,
    cost_us: Callable[[str, int], float],
    fallback_us: float | None = None,
    factors: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Let every launcher compute with torch, times its factor, in `cost_us(kernel, M)` of the GPU's time; and the fallback,
    in `fallback_us`, which otherwise computes as it does, in no time."""

    def launcher(name: str):
        def run(x, packed, scales, group, bias=None, out=None):
            gpu.now += cost_us(name, x.shape[0])
            weight = PackedWeight(PRODUCTS[name].bits, group, packed.shape[0], x.shape[1], packed, scales)
            return out.copy_(factors.get(name, 1.0) * (x.float() @ weight.dequantise(torch.float32).T))

        return run

    def tiled_launcher(name: str):
        def run(x, tiles, scales, n, group, bias=None, out=None):
            gpu.now += cost_us(name, x.shape[0])
            weight = from_tiles(TiledWeight(TILED[name].bits, group, n, x.shape[1], tiles, scales))
            return out.copy_(factors.get(name, 1.0) * (x.float() @ weight.dequantise(torch.float32).T))

        return run

    def fallback(x, weight):
        gpu.now += fallback_us
        return (x.float() @ weight.dequantise(torch.float32).T).to(x.dtype)

    monkeypatch.setattr(cells, "LAUNCHERS", {name: launcher(name) for name in LAUNCHERS})
    monkeypatch.setattr(cells, "TILED_LAUNCHERS", {name: tiled_launcher(name) for name in TILED_LAUNCHERS})
    if fallback_us is not None:
        monkeypatch.setattr(cells, "dequant_cublas", fallback)
