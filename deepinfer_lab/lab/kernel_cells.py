"""One multiplication by every kernel that can do it: fresh random operands, a check of each result, then its time."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kernels import LAUNCHERS
from deepinfer_lab.kernels.catalogue import PRODUCTS
from deepinfer_lab.kernels.dispatch import FALLBACK
from deepinfer_lab.lab.kernel_timing import ARTICLE, GRAPH_COLD, MIN_REPLAYS, Gpu, article, copies_for, graph_cold
from deepinfer_lab.quant.layout import PackedWeight, packed_columns
from deepinfer_lab.quant.linear import dequant_cublas

DENSE = "cublas_fp16"  # an unquantised float16 weight of the same shape: bits 16, group null
EMPTY = "empty_launch"  # out = x * weight, one value each: what a launch costs that does nothing. M = N = K = 1
EMPTY_LAUNCHES = 64  # in one graph
MAX_ERROR = 2e-3  # of norm(out - reference) / norm(reference): float16 rounding stays well below
REFERENCE_ROWS = 4096  # of the weight that are held in float32 at a time

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


def kernels_for(bits: int, m: int) -> list[str]:
    """Every way to multiply M rows with a weight of so many bits: launchers that take that M, and the old fallback; for 16
    bits, cuBLAS."""
    if bits == 16:
        return [DENSE]
    return [name for name, product in PRODUCTS.items() if product.bits == bits and m <= product.max_m] + [FALLBACK]


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
    x = torch.randn(m, matrix.k, generator=random, device=gpu.device, dtype=torch.float16)
    out = torch.empty(m, matrix.n, device=gpu.device, dtype=torch.float16)
    expected = _reference(x, matrix.copies[0])
    for kernel in kernels:
        launch = _launcher(kernel, x, matrix.copies, out)
        error = _error(launch, out, expected)
        for method in methods:
            yield {
                "bits": matrix.bits,
                "m": m,
                "n": matrix.n,
                "k": matrix.k,
                "group": matrix.group,
                "kernel": kernel,
                "method": method,
                "time_us": _time(gpu, method, launch, len(matrix.copies), replays),
                "rel_err": error if math.isfinite(error) else None,
                "floor_us": floor_us(matrix, m, bandwidth),
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


def _launcher(
    kernel: str, x: torch.Tensor, copies: Sequence[Weight], out: torch.Tensor
) -> Callable[[int], torch.Tensor]:
    """Enqueue the kernel on one copy of the weights. Results go to `out`, but for the fallback, which allocates its own."""
    if kernel == FALLBACK:
        return lambda copy: dequant_cublas(x, copies[copy])
    if kernel == DENSE:
        return lambda copy: torch.matmul(x, copies[copy].T, out=out)
    if kernel == EMPTY:
        return lambda copy: torch.mul(x, copies[copy], out=out)
    if kernel not in LAUNCHERS:
        raise SettingError(f"kernel {kernel!r}: there are {', '.join((*LAUNCHERS, FALLBACK, DENSE, EMPTY))}")
    run = LAUNCHERS[kernel]

    def launch(copy: int) -> torch.Tensor:
        weight = copies[copy]
        return run(x, weight.packed, weight.scales, weight.group, out=out)

    return launch


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


def _error(launch: Callable[[int], torch.Tensor], out: torch.Tensor, expected: torch.Tensor) -> float:
    """norm(out - reference) / norm(reference) of the first copy, into memory that held NaN: what is not written shows."""
    torch.full_like(out, torch.nan)  # freed at once: torch's allocator hands it to the fallback, which brings no `out`
    out.fill_(torch.nan)
    result = launch(0).float()
    return float((result - expected).norm() / expected.norm())


def _time(gpu: Gpu, method: str, launch: Callable[[int], torch.Tensor], copies: int, replays: int) -> list[float]:
    if method == GRAPH_COLD:
        return graph_cold(gpu, launch, copies, replays)
    if method == ARTICLE:
        return article(gpu, launch)
    raise SettingError(f"timing method {method!r}: allowed are {GRAPH_COLD}, {ARTICLE}")
