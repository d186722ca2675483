"""Our kernels beside other people's: the same products, checked and timed in one run."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import dispatch
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.kernel_cells import (
    DENSE,
    MAX_ERROR,
    Case,
    Matrix,
    kernels_for,
    launcher,
    random_case,
    random_matrix,
)
from deepinfer_lab.lab.kernel_dispatch import newest_table
from deepinfer_lab.lab.kernel_timing import CudaGpu, Gpu, graph_cold
from deepinfer_lab.lab.peers import Peer, find
from deepinfer_lab.progress import bar

OURS, CUBLAS = "deepinfer_lab", "cublas"
PEER_MAX_ERROR = 5e-3  # bfloat16 rounds eight times as coarsely as float16


@dataclass(frozen=True)
class Contestant:
    """One way to multiply.

    Attributes:
        peer, kernel: its names in a row.
        bind: a case -> what enqueues the product with one copy of its weights.
        max_error: from which on a result is wrong.
    """

    peer: str
    kernel: str
    bind: Callable[[Case], Callable[[int], torch.Tensor]]
    max_error: float


def peer_rows(
    params: dict[str, Any], gpu: Gpu, table: Sequence[dispatch.Row], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Rows: peer, bits, m, n, k, group, kernel, time_us (raw, `graph_cold`), rel_err, floor_us, correct.

    Ours is the kernel that the table chooses, or every one that takes the product with `all_kernels`; cuBLAS multiplies a dense
    fp16 weight (bits 16, no group). `correct`: the error is under 2e-3 for ours and cuBLAS, under 5e-3 for peers, some of which
    compute in bfloat16. What cannot be timed has no row; `say` is told why.

    Args:
        params: as `KERNEL_PEERS.defaults`.

    Raises:
        SettingError, MissingDependency: a peer that is unknown or not installed was asked for.
        QuantisationError: a K that the group does not divide.
    """
    peers = find(params["against"])
    random = torch.Generator(gpu.device).manual_seed(params["seed"])
    bandwidth = gpu.read_bandwidth()
    weights = [(n, k, bits) for n, k in params["shapes"] for bits in (16, *params["bits"])]
    for n, k, bits in bar(weights, desc="products", unit="weight"):
        matrix = random_matrix(gpu, random, bits, n, k, params["group"])
        others = [] if bits == 16 else list(_others(peers, matrix, say))
        gpu.rest()  # many rows of the weight before may have lowered its clock, and few come first
        for m in params["m"]:
            case = random_case(gpu, random, matrix, m)
            every = bits == 16 or params["all_kernels"]
            names = kernels_for(bits, m, gpu.device) if every else [dispatch.choose(bits, m, table=table, n=n, k=k)]
            ours = [one_of_ours(name) for name in names]
            for contestant in (*ours, *others):
                yield from timed(gpu, case, contestant, bandwidth, params["replays"], say)


def one_of_ours(name: str) -> Contestant:
    """A kernel of ours, or cuBLAS with a dense weight, by the name that `kernel_cells.launcher` knows."""
    return Contestant(CUBLAS if name == DENSE else OURS, name, partial(launcher, name), MAX_ERROR)


def _others(peers: Sequence[Peer], matrix: Matrix, say: Callable[[str], None]) -> Iterator[Contestant]:
    """Those peers that take the matrix, all copies of which are now in their own form."""

    def bind(peer: Peer, copies: Sequence[Callable[[torch.Tensor], torch.Tensor]], case: Case):
        x = case.x.to(peer.dtype)
        return lambda copy: copies[copy](x)

    for peer in peers:
        refusal = peer.refusal(matrix.bits, matrix.n, matrix.k, matrix.group)
        try:
            copies = [peer.prepare(copy) for copy in matrix.copies] if refusal is None else []
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as failure:  # other people's code raises what it likes, and the rest shall still be measured
            refusal = _first_line(failure)
        if refusal is None:
            yield Contestant(peer.name, peer.kernel, partial(bind, peer, copies), PEER_MAX_ERROR)
        else:
            say(f"{peer.name} left out, W{matrix.bits}, N x K = {matrix.n} x {matrix.k}: {refusal}")


def timed(
    gpu: Gpu, case: Case, contestant: Contestant, bandwidth: float, replays: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """One row, as `peer_rows` has them, or none where the product cannot be had."""
    columns = case.columns(bandwidth)
    try:
        launch = contestant.bind(case)
        error = case.error(launch)
        time_us = graph_cold(gpu, launch, len(case.matrix.copies), replays)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as failure:
        if contestant.peer in (OURS, CUBLAS) and not isinstance(failure, KernelError):
            raise  # a fault of ours
        at = "W{bits}, M x N x K = {m} x {n} x {k}".format(**columns)
        say(f"{contestant.peer} {contestant.kernel} left out, {at}: {_first_line(failure)}")
        return
    yield {
        "peer": contestant.peer,
        **columns,
        "kernel": contestant.kernel,
        "time_us": time_us,
        "rel_err": error if math.isfinite(error) else None,
        "correct": error < contestant.max_error,  # NaN is not
    }


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).strip() or 'no message').splitlines()[0]}"


def median_us(row: dict[str, Any]) -> float:
    """The figure to quote of a row's raw times."""
    return float(np.median(row["time_us"]))


def aside(text: str) -> None:
    """Say what has no row, where it does not get among the rows."""
    print(text, file=sys.stderr)


def _measure(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    gpu = CudaGpu()
    return peer_rows(params, gpu, dispatch.table_named(newest_table(), gpu.device), aside)


KERNEL_PEERS = Experiment(
    name="kernel_peers",
    measure=_measure,
    defaults={
        "shapes": [
            [5632, 2048],
            [2048, 5632],
            [3584, 18944],
            [37888, 3584],
            [11008, 2048],
            [2048, 11008],
            [2560, 2048],
        ],
        "bits": [4, 3],
        "m": [1, 2, 4, 8, 16, 30, 32, 64, 128, 256, 512, 2048],
        "against": None,  # peers by name; None: all that are installed
        "all_kernels": False,
        "group": 128,
        "replays": 21,
        "seed": 0,
    },
    runs_on_cpu=False,
    description="our W4 and W3 kernels beside cuBLAS and other people's, on seven shapes for M = 1 to 2,048",
)
