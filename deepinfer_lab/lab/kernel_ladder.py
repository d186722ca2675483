"""From the article's kernels to those on tensor cores: every rung of the way, for a few products, with its prediction."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from deepinfer_lab.lab import provenance
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.kernel_cells import DENSE, FEW_BIT, measure_empty, random_case, random_matrix
from deepinfer_lab.lab.kernel_ladder_model import Card, Cell, predict
from deepinfer_lab.lab.kernel_peers import aside, median_us, one_of_ours, timed
from deepinfer_lab.lab.kernel_timing import CudaGpu, Gpu
from deepinfer_lab.lab.record import Record
from deepinfer_lab.progress import bar

GEMV_ROWS = 8  # up to which the article multiplies a row at a time, and from which on in tiles


def rungs(bits: int, m: int) -> list[str]:
    """Kernels for M rows in the order in which they came: the article's for so many rows, then every later one.

    For 16 bits, cuBLAS alone.
    """
    if bits == 16:
        return [DENSE]
    left_out = "tiled_gemm" if m <= GEMV_ROWS else "gemv"
    fitting = [name for name, product in FEW_BIT.items() if product.bits == bits and m <= product.max_m]
    return [name for name in fitting if left_out not in name]


def card_of(record: Record) -> Card:
    """What the record's predictions were made of. A clock that nobody could tell is infinite: then no limit counts cycles."""
    empty, large, first = record.samples[:3]
    moved = Cell(*(first[name] for name in ("bits", "m", "n", "k", "group"))).cost.bytes
    origin = record.provenance
    return Card(
        bytes_per_s=moved / first["floor_us"] * 1e6,
        flops_per_s=2e6 * large["m"] * large["n"] * large["k"] / median_us(large),
        launch_us=median_us(empty),
        multiprocessors=origin["multiprocessors"],
        hertz=clock_hz(origin),
    )


def clock_hz(origin: Mapping[str, Any]) -> float:
    """The highest of a multiprocessor, by a provenance; infinite where nvidia-smi was not there to tell."""
    return origin["clocks"].get("sm_max_mhz", math.inf) * 1e6


def ladder_rows(
    params: dict[str, Any], gpu: Gpu, multiprocessors: int, hertz: float, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Rows as `kernel_peers.peer_rows` has them, and `predicted_us` and `bound`, which `kernel_ladder_model` says.

    The first is an empty launch, the second a square product by cuBLAS. With the bandwidth, which `floor_us` holds, they are
    what predictions are made of, and so have none.

    Args:
        params: as `KERNEL_LADDER.defaults`. multiprocessors, hertz: of the card. say: is told what has no row.
    """
    random = torch.Generator(gpu.device).manual_seed(params["seed"])
    bandwidth, replays, size = gpu.read_bandwidth(), params["replays"], params["square"]
    nothing = {"predicted_us": None, "bound": None}
    empty = {"peer": "torch", **measure_empty(gpu, bandwidth, replays), **nothing}
    del empty["method"]  # always the same here
    yield empty
    square = random_case(gpu, random, random_matrix(gpu, random, 16, size, size, params["group"]), size)
    (large,) = timed(gpu, square, one_of_ours(DENSE), bandwidth, replays, say)
    yield {**large, **nothing}
    card = Card(bandwidth, 2e6 * size**3 / median_us(large), median_us(empty), multiprocessors, hertz)
    weights = [(n, k, bits) for n, k in params["shapes"] for bits in (*params["bits"], 16)]
    for n, k, bits in bar(weights, desc="ladder", unit="weight"):
        matrix = random_matrix(gpu, random, bits, n, k, params["group"])
        for m in params["m"]:
            case = random_case(gpu, random, matrix, m)
            for name in rungs(bits, m):
                expected = predict(name, Cell(bits, m, n, k, matrix.group), card)
                for row in timed(gpu, case, one_of_ours(name), bandwidth, replays, say):
                    yield {**row, "predicted_us": expected.us, "bound": expected.bound}


def _measure(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    origin = provenance.collect()
    return ladder_rows(params, CudaGpu(), origin["multiprocessors"], clock_hz(origin), aside)


KERNEL_LADDER = Experiment(
    name="kernel_ladder",
    measure=_measure,
    defaults={
        "shapes": [[5632, 2048], [3584, 18944], [37888, 3584]],  # N, K: a small one, a long and a wide one
        "bits": [4, 3],
        "m": [1, 8, 16, 64, 256],
        "square": 8192,  # M, N and K of the product that says what tensor cores can do
        "group": 128,
        "replays": 21,
        "seed": 0,
    },
    runs_on_cpu=False,
    description="every W4 and W3 kernel from the article's to those on tensor cores, with what it should take",
)
