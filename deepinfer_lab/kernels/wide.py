"""Launchers of the kernels for many rows on the tensor cores of Hopper (compute capability 9.0), on weights in tiles
(`quant/tiles.py`, `cuda/wide.cuh`), whose blocks form clusters.

x[M, K] @ weight[N, K].T + bias[N]: arguments and rounding are those of `kernels/mma_block.py`. Made for M from 17 to some
thousands, right for any. For many rows (`wide_plan.py`) there are two launches: the first writes the activations, in the order
in which blocks copy them, to memory of torch's allocator, about as much as x has.

Raises:
    KernelError: as there; or a device of another compute capability, which lacks `wgmma`.
"""

import functools
from collections.abc import Mapping

import torch

from deepinfer_lab.kernels.catalogue import TILED
from deepinfer_lab.kernels.check import MAX_INT
from deepinfer_lab.kernels.loader import held_clusters, launch_op
from deepinfer_lab.kernels.mma_block import MAX_K, Maybe
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require
from deepinfer_lab.kernels.tiles_check import checked, require_capability
from deepinfer_lab.kernels.wide_cuts import UNIT_K, WIDE_CUTS
from deepinfer_lab.kernels.wide_plan import WidePlan, plan, tiles_of

ARRANGE = OPS["arrange_rows"]
ARRANGED_ROWS, ARRANGED_UNITS = 16, 2  # by a block of that
MAX_N = MAX_INT - max(cut.outputs for cut in WIDE_CUTS)
PLANS = 4096  # kept of products; to choose one takes the CPU longer than a launch


def w4_wide(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Four bits."""
    return _multiply("w4_wide", x, tiles, scales, n, group, bias, out)


def w3_wide(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Three bits."""
    return _multiply("w3_wide", x, tiles, scales, n, group, bias, out)


def _multiply(
    name: str,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe,
    out: Maybe,
) -> torch.Tensor:
    require_capability(name, x)
    bits = TILED[name].bits
    limits = {"max_m": TILED[name].max_m, "max_n": MAX_N, "max_k": MAX_K}
    x = checked(name, bits, x, tiles, scales, n, group, bias, **limits)
    m, k = x.shape
    out = torch.empty(m, n, dtype=torch.float16, device=x.device) if out is None else out
    expect(name, "out", out, torch.float16, (m, n), x.device)
    run(planned(bits, m, n, k, x.device.index), x, tiles, scales, bias, out, group)
    return out


@functools.cache
def held(device: int) -> Mapping[int, int]:
    """Clusters that the device holds at once, by the number of their blocks. One cut speaks for all: their blocks each fill a
    multiprocessor."""
    cut = WIDE_CUTS[0]
    return held_clusters(OPS[cut.name], cut.shared, device)


@functools.lru_cache(PLANS)
def planned(bits: int, m: int, n: int, k: int, device: int) -> WidePlan:
    """`wide_plan.plan` for this device."""
    return plan(bits, m, n, k, held(device))


def run(
    chosen: WidePlan,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    bias: Maybe,
    out: torch.Tensor,
    group: int,
) -> None:
    """Enqueue this plan, without a look at the operands."""
    (m, k), n, cut = x.shape, out.shape[1], chosen.cut
    units, rows = -(-k // UNIT_K), -(-m // 8) * 8
    arrangers = -(-rows // ARRANGED_ROWS) * -(-units // ARRANGED_UNITS)
    counted = max(arrangers, tiles_of(cut, m, n) * units)
    require(counted <= MAX_INT, f"{cut.name}: M x N x K = {m} x {n} x {k} is too large")
    if cut.arranged:
        arranged = torch.empty(2 * units, rows, UNIT_K // 2, dtype=torch.float16, device=x.device)
        launch_op(ARRANGE, (arrangers,), (x, arranged), m, k)
        x = arranged
    tensors, grid = (x, tiles, scales, bias, out), (chosen.clusters * chosen.blocks,)
    launch_op(OPS[cut.name], grid, tensors, m, n, k, group, shared=cut.shared, cluster=chosen.blocks)
