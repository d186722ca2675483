"""Launchers of the kernels for many rows on the tensor cores of Hopper (compute capability 9.0), on weights in tiles
(`quant/tiles.py`, `cuda/wgmma.cuh`).

x[M, K] @ weight[N, K].T + bias[N]: arguments, limits and rounding are those of `kernels/mma_block.py`. Made for M from 17 to
some hundreds, right for any.

Raises:
    KernelError: as there; or a device of another compute capability, which lacks `wgmma`.
"""

import torch

from deepinfer_lab.kernels.mma_block import Maybe, Plan, block_counts, multiply, tiles_of, units_of
from deepinfer_lab.kernels.tiles_check import require_capability
from deepinfer_lab.kernels.wgmma_cuts import WGMMA_CUTS

# What a plan is chosen by, in cycles of a multiprocessor of the H200, as a profile of blocks of 128 outputs has it.
COLUMN = 0.5  # of N of wgmma m64nNk16: four tensor cores, each of 512 multiply-adds a cycle
UNIT, STEP = 400, 440  # of a warpgroup: of the barriers of a unit; of 64 k, most of it decoding
BYTE_FROM_L2, WEIGHT_BYTE = 1 / 20, 1 / 18  # all multiprocessors reading; the latter from memory
START, TILE, SUM = 3000, 800, 0.2  # of a block; of a tile that it finishes, and a sum of it
ADD_PARTS = 5000  # of parts of one tile, beside what they weigh


def plan(bits: int, m: int, n: int, k: int, multiprocessors: int, shared: int) -> Plan:
    """The plan that a rough model of the card calls fastest: no shape comes unforeseen.

    Args:
        shared: bytes of shared memory that a block may have.
    """
    plans = [
        Plan(cut, blocks)
        for cut in WGMMA_CUTS
        if cut.bits == bits and cut.shared <= shared
        for blocks in block_counts(cut, m, n, k, multiprocessors, shared)
        # Where two parts of a tile or more find a multiprocessor each, unequal ones have taken up to 1.5 times as long as this.
        if blocks % tiles_of(cut, m, n) == 0 or 2 * tiles_of(cut, m, n) > multiprocessors
    ]
    return min(plans, key=lambda p: cycles(p, m, n, k, multiprocessors))


def cycles(p: Plan, m: int, n: int, k: int, multiprocessors: int) -> float:
    """What the model says: the slowest of products, decoding, L2 and memory, for the multiprocessor with most to do."""
    cut, units, tiles = p.cut, units_of(p.cut, k), tiles_of(p.cut, m, n)
    rows = min(m, cut.rows)
    weights, activations = cut.outputs * cut.unit_k * cut.bits / 8, rows * cut.unit_k * 2
    products = cut.outputs / 64 * cut.rows * (cut.unit_k / 16) * COLUMN
    chain = (UNIT + 2 * STEP) / cut.teams
    unit = max(products, chain, (weights + activations) * BYTE_FROM_L2, weights * WEIGHT_BYTE)
    share = -(-tiles * units // p.blocks)  # of the block with most
    finish = (TILE + cut.outputs * rows * SUM) * max(share / units, 1)
    # Each writes its part and reads as much of all parts.
    adding = 0 if p.blocks == tiles else ADD_PARTS + 2 * cut.outputs * rows * 4 * BYTE_FROM_L2
    return -(-p.blocks // multiprocessors) * (START + finish + share * unit) + adding


def w4_wgmma(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Four bits."""
    return _multiply("w4_wgmma", x, tiles, scales, n, group, bias, out)


def w3_wgmma(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Three bits."""
    return _multiply("w3_wgmma", x, tiles, scales, n, group, bias, out)


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
    return multiply(name, plan, x, tiles, scales, n, group, bias, out)
