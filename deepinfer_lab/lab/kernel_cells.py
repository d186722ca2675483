"""One multiplication by every kernel that can do it: fresh random operands, a check of each result, then its time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kernels import LAUNCHERS, TILED_LAUNCHERS
from deepinfer_lab.kernels.catalogue import PRODUCTS, TILED, DequantiseProduct, Kernel, MmaProduct
from deepinfer_lab.kernels.dispatch import FALLBACK
from deepinfer_lab.lab.kernel_timing import ARTICLE, GRAPH_COLD, MIN_REPLAYS, Gpu, article, copies_for, graph_cold
from deepinfer_lab.quant.layout import PackedWeight, packed_columns
from deepinfer_lab.quant.linear import dequant_cublas
from deepinfer_lab.quant.tiles import to_tiles

DENSE = "cublas_fp16"  # an unquantised float16 weight of the same shape: bits 16, group null
EMPTY = "empty_launch"  # out = x * weight, one value each: what a launch costs that does nothing. M = N = K = 1
EMPTY_LAUNCHES = 64  # in one graph
MAX_ERROR = 2e-3  # of norm(out - reference) / norm(reference): float16 rounding stays well below
REFERENCE_ROWS = 4096  # of the weight that are held in float32 at a time

# All that can multiply a few-bit weight, the simplest first; and then there is the fallback.
FEW_BIT: Mapping[str, Kernel | DequantiseProduct | MmaProduct] = {**PRODUCTS, **TILED}

Weight = PackedWeight | torch.Tensor


@dataclass(frozen=True)
class Matrix:
    """Copies of one weight's shape, all different, that together exceed the L2 four times over.

    `group` is None and `bits` 16 where `copies` are dense float16 [n, k].
    """

    bits: int
    n: int
    k: int
    group: int | None
    copies: Sequence[Weight]


@dataclass(frozen=True)
class Case:
    """M rows to multiply with a matrix: `x` [m, k], `out` [m, n] to write to, and the right result, `expected`, in float32."""

    matrix: Matrix
    x: torch.Tensor
    out: torch.Tensor
    expected: torch.Tensor

    def columns(self, bandwidth: float) -> dict[str, Any]:
        """What every row says of the product: bits, m, n, k, group, floor_us."""
        matrix, m = self.matrix, self.x.shape[0]
        sizes = {"bits": matrix.bits, "m": m, "n": matrix.n, "k": matrix.k, "group": matrix.group}
        return {**sizes, "floor_us": floor_us(matrix, m, bandwidth)}

    def error(self, launch: Callable[[int], torch.Tensor]) -> float:
        """norm(result - expected) / norm(expected) of the first copy, into memory that held NaN: what is not written shows."""
        torch.full_like(self.out, torch.nan)  # freed at once: torch hands it to a launch that brings no `out`
        self.out.fill_(torch.nan)
        result = launch(0).float()
        return float((result - self.expected).norm() / self.expected.norm())


def random_case(gpu: Gpu, random: torch.Generator, matrix: Matrix, m: int) -> Case:
    """Fresh activations, normally distributed.

    Raises:
        SettingError: TF32 is on, in which the reference would not be one.
    """
    x = torch.randn(m, matrix.k, generator=random, device=gpu.device, dtype=torch.float16)
    out = torch.empty(m, matrix.n, device=gpu.device, dtype=torch.float16)
    return Case(matrix, x, out, _reference(x, matrix.copies[0]))


def random_matrix(gpu: Gpu, random: torch.Generator, bits: int, n: int, k: int, group: int) -> Matrix:
    """Random weights of a layer's magnitude; every byte is a valid packed byte in either layout.

    Args:
        bits: 3, 4, or 16 for dense float16, which has no group.
    """

    def packed() -> PackedWeight:
        at = {"generator": random, "device": gpu.device}
        values = torch.randint(0, 256, (n, packed_columns(k, bits)), dtype=torch.uint8, **at)
        scales = (torch.rand(n, k // group, **at) * 0.02 + 0.005).half()
        return PackedWeight(bits, group, n, k, values, scales)

    def dense() -> torch.Tensor:
        return torch.randn(n, k, generator=random, device=gpu.device, dtype=torch.float16) * 0.05

    draw, nbytes = (dense, n * k * 2) if bits == 16 else (packed, packed_columns(k, bits) * n + n * (k // group) * 2)
    copies = [draw() for _ in range(copies_for(gpu.l2_bytes, nbytes))]
    return Matrix(bits, n, k, None if bits == 16 else group, copies)


def kernels_for(bits: int, m: int, device: torch.device | None = None) -> list[str]:
    """Every way to multiply M rows with a weight of so many bits: launchers that take that M, and the old fallback; for 16
    bits, cuBLAS. device: leave out what this CUDA device cannot run."""
    if bits == 16:
        return [DENSE]
    fitting = (name for name, product in FEW_BIT.items() if product.bits == bits and m <= product.max_m)
    return [name for name in fitting if device is None or _runs_on(FEW_BIT[name], device)] + [FALLBACK]


def _runs_on(product: Kernel | DequantiseProduct | MmaProduct, device: torch.device) -> bool:
    if device.type != "cuda" or not isinstance(product, MmaProduct) or product.capability is None:
        return True
    return torch.cuda.get_device_capability(device) == product.capability


def floor_us(matrix: Matrix, m: int, bandwidth: float) -> float:
    """The least time in which memory can deliver weights, scales and activations and take the output, in microseconds.

    Args:
        bandwidth: bytes per second.
    """
    return (matrix.copies[0].nbytes + m * matrix.k * 2 + m * matrix.n * 2) / bandwidth * 1e6


def measure(
    gpu: Gpu,
    random: torch.Generator,
    matrix: Matrix,
    m: int,
    kernels: Sequence[str],
    methods: Sequence[str],
    bandwidth: float,
    replays: int = MIN_REPLAYS,
) -> Iterator[dict[str, Any]]:
    """One row a kernel and method: bits, m, n, k, group, kernel, method, time_us (raw), rel_err, floor_us, correct.

    `rel_err` is null where an output is not finite.

    Raises:
        SettingError: an unknown method, or TF32, in which the reference would not be one.
    """
    case = random_case(gpu, random, matrix, m)
    for kernel in kernels:
        launch = launcher(kernel, case)
        error = case.error(launch)
        for method in methods:
            yield {
                **case.columns(bandwidth),
                "kernel": kernel,
                "method": method,
                "time_us": _time(gpu, method, launch, len(matrix.copies), replays),
                "rel_err": error if math.isfinite(error) else None,
                "correct": error < MAX_ERROR,  # NaN is not
            }


def measure_empty(gpu: Gpu, bandwidth: float, replays: int = MIN_REPLAYS) -> dict[str, Any]:
    """The row of a launch that multiplies one number: under every other time there is this much that no kernel can save."""
    random = torch.Generator(gpu.device).manual_seed(0)
    one = Matrix(16, 1, 1, None, [torch.ones(1, 1, device=gpu.device, dtype=torch.float16)] * EMPTY_LAUNCHES)
    (row,) = measure(gpu, random, one, 1, [EMPTY], [GRAPH_COLD], bandwidth, replays)
    return row


def summary(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples with one figure each, `us`: the median of `graph_cold`, the mean of `article`, as the methods are meant.

    `spread` is the interquartile range over the median. Other columns stay, raw timings do not.
    """
    figures = samples.drop(columns="time_us")
    raw = [np.asarray(times) for times in samples["time_us"]]
    means = samples["method"] == ARTICLE
    figures["us"] = [t.mean() if mean else np.median(t) for t, mean in zip(raw, means, strict=True)]
    figures["spread"] = [(np.quantile(t, 0.75) - np.quantile(t, 0.25)) / np.median(t) for t in raw]
    return figures


def launcher(kernel: str, case: Case) -> Callable[[int], torch.Tensor]:
    """Enqueue the kernel on one copy of the weights. Results go to the case's `out`, but for the fallback, which allocates its
    own."""
    bound = [_bind(kernel, copy) for copy in case.matrix.copies]
    return lambda copy: bound[copy](case.x, case.out)


def _bind(kernel: str, weight: Weight) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(x, out) -> result, with the weight in the form that the kernel reads."""
    if kernel == FALLBACK:
        return lambda x, out: dequant_cublas(x, weight)
    if kernel == DENSE:
        return lambda x, out: torch.matmul(x, weight.T, out=out)
    if kernel == EMPTY:
        return lambda x, out: torch.mul(x, weight, out=out)
    if kernel in TILED_LAUNCHERS:
        multiply, tiled = TILED_LAUNCHERS[kernel], to_tiles(weight)
        return lambda x, out: multiply(x, tiled.tiles, tiled.scales, tiled.n, tiled.group, out=out)
    if kernel not in LAUNCHERS:
        raise SettingError(
            f"kernel {kernel!r}: there are {', '.join((*LAUNCHERS, *TILED_LAUNCHERS, FALLBACK, DENSE, EMPTY))}"
        )
    run = LAUNCHERS[kernel]
    return lambda x, out: run(x, weight.packed, weight.scales, weight.group, out=out)


def _reference(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """In float32, from float32 weights."""
    if torch.backends.cuda.matmul.allow_tf32:
        raise SettingError("torch.backends.cuda.matmul.allow_tf32 is on: the float32 reference needs it off")
    parts = []
    for start in range(0, weight.shape[0] if isinstance(weight, torch.Tensor) else weight.n, REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        dense = weight[rows].float() if isinstance(weight, torch.Tensor) else weight.dequantise(torch.float32, rows)
        parts.append(x.float() @ dense.T)
    return torch.cat(parts, dim=1)


def _time(gpu: Gpu, method: str, launch: Callable[[int], torch.Tensor], copies: int, replays: int) -> list[float]:
    if method == GRAPH_COLD:
        return graph_cold(gpu, launch, copies, replays)
    if method == ARTICLE:
        return article(gpu, launch)
    raise SettingError(f"timing method {method!r}: allowed are {GRAPH_COLD}, {ARTICLE}")
