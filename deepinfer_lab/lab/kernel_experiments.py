"""The experiments of notebooks 01 and 02: the article's two kernel tables, and where each kernel is the fastest."""

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer_lab.kernels.dispatch import FALLBACK
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.kernel_cells import DENSE, kernels_for, measure, measure_empty, random_matrix
from deepinfer_lab.lab.kernel_timing import ARTICLE, GRAPH_COLD, CudaGpu, Gpu
from deepinfer_lab.progress import bar

W3_SMALL_BATCH = ("w3_gemv_grid_y", "w3_gemv_batch_tile", "w3_gemv_warp_tile")


def tiled_gemm_rows(params: dict[str, Any], gpu: Gpu) -> Iterator[dict[str, Any]]:
    """First the article's shapes by both methods, then M from 1 up; 41 and, on Hopper, 422 rows with the default parameters.

    Rows are those of `kernel_cells.measure`; the first is the empty launch.
    """
    random = torch.Generator(gpu.device).manual_seed(params["seed"])
    bandwidth = gpu.read_bandwidth()
    group, replays = params["group"], params["replays"]
    yield measure_empty(gpu, bandwidth, replays)
    for bits, m, n, k in bar(params["article_shapes"], desc="article's shapes", unit="shape"):
        for its, kernels in ((bits, [f"w{bits}_tiled_gemm", f"w{bits}_tiled_gemm_split_k", FALLBACK]), (16, [DENSE])):
            matrix = random_matrix(gpu, random, its, n, k, group)
            yield from measure(gpu, random, matrix, m, kernels, [GRAPH_COLD, ARTICLE], bandwidth, replays)
    weights = [(n, k, bits) for n, k in params["sweep_shapes"] for bits in (4, 3, 16)]
    for n, k, bits in bar(weights, desc="crossover", unit="weight"):
        matrix = random_matrix(gpu, random, bits, n, k, group)
        for m in params["sweep_m"]:
            yield from measure(
                gpu, random, matrix, m, kernels_for(bits, m, gpu.device), [GRAPH_COLD], bandwidth, replays
            )


def w3_batch_tile_rows(params: dict[str, Any], gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Three kernels for a few rows of W3, by both methods; 145 rows with the default parameters, the empty launch first."""
    random = torch.Generator(gpu.device).manual_seed(params["seed"])
    bandwidth = gpu.read_bandwidth()
    yield measure_empty(gpu, bandwidth, params["replays"])
    for n, k in bar(params["shapes"], desc="shapes", unit="shape"):
        matrix = random_matrix(gpu, random, 3, n, k, params["group"])
        for m in params["batch"]:
            methods = [GRAPH_COLD, ARTICLE]
            yield from measure(gpu, random, matrix, m, W3_SMALL_BATCH, methods, bandwidth, params["replays"])


def _tiled_gemm(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return tiled_gemm_rows(params, CudaGpu())


def _w3_batch_tile(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return w3_batch_tile_rows(params, CudaGpu())


TILED_GEMM = Experiment(
    name="tiled_gemm",
    measure=_tiled_gemm,
    defaults={
        "article_shapes": [  # bits, M, N, K: section 2.7
            [4, 30, 5632, 2048],
            [4, 30, 2048, 5632],
            [4, 30, 3584, 18944],
            [3, 30, 37888, 3584],
            [3, 30, 3584, 18944],
        ],
        "sweep_shapes": [[5632, 2048], [3584, 18944]],  # N, K
        "sweep_m": [1, 2, 4, 8, 9, 16, 32, 64, 128, 256, 512],
        "group": 128,
        "replays": 21,
        "seed": 0,
    },
    runs_on_cpu=False,
    description="tiled W4/W3 GEMM against dequantise + cuBLAS and dense cuBLAS, and every kernel over M = 1 to 512",
)

W3_BATCH_TILE = Experiment(
    name="w3_batch_tile",
    measure=_w3_batch_tile,
    defaults={
        "shapes": [[5632, 2048], [3584, 18944], [37888, 3584]],  # N, K
        "batch": [1, 2, 3, 4, 5, 6, 7, 8],
        "group": 128,
        "replays": 21,
        "seed": 0,
    },
    runs_on_cpu=False,
    description="W3 for 1 to 8 rows: weights read once per row, or once for all rows in two layouts",
)
