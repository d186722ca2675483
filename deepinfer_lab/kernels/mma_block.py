"""Launchers of the tensor-core kernels for some dozens of rows, on weights in tiles (`quant/tiles.py`, `cuda/mma_block.cuh`).

x[M, K] @ weight[N, K].T + bias[N], the weight as `TiledWeight` has it. Made for M from 9 to some hundreds, right for any: up to
128 rows share one read of the weights. Weights times scales are rounded to float16, as a dequantised weight is; sums are
float32, added always in the same order. A row's result is the same bits for every M that has the same plan.

Args:
    x: float16 [M, K] on a CUDA device. Copied where it is not contiguous or not 16-byte aligned.
    tiles: uint8 [ceil(N / 16), ceil(K / 128), 256 * bits]. scales: float16 [ceil(N / 16), ceil(K / 128) * 128 / group, 8, 2].
    n: N. group: 32, 64 or 128, a divisor of K. bias: float16 [N], or None.
    out: float16 [M, N], contiguous, to write into; None allocates it.

Returns:
    float16 [M, N].

Raises:
    KernelError: a shape, dtype, layout or device outside these limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_lab.kernels.catalogue import TILED
from deepinfer_lab.kernels.check import MAX_INT
from deepinfer_lab.kernels.counters import counters
from deepinfer_lab.kernels.loader import launch_op, max_shared, multiprocessors
from deepinfer_lab.kernels.mma_cuts import CUTS, Cut
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require
from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, checked

Maybe = torch.Tensor | None
MAX_K = 2**22  # so that offsets within a block's rows fit 32 bits
# What a plan is chosen by, in cycles of a multiprocessor of the H200; only their relations matter.
PRODUCT = 6.5 / 4  # one m16n8k16, four at a time
BYTE_FROM_L2, WEIGHT_BYTE = 1 / 42, 1 / 18  # all multiprocessors reading; the latter from memory
START, ADD_PARTS, PART_BYTE = 2500, 2000, 1 / 48  # of a block; of adding parts of one tile, and a byte of them


@dataclass(frozen=True)
class Plan:
    """A cut, and among how many blocks all units of all tiles of the output are shared evenly."""

    cut: Cut
    blocks: int


def plan(bits: int, m: int, n: int, k: int, multiprocessors: int, shared: int) -> Plan:
    """The plan that a rough model of the card calls fastest: no shape comes unforeseen.

    Args:
        shared: bytes of shared memory that a block may have.
    """
    rows = sorted({cut.rows for cut in CUTS})
    fitting = next((size for size in rows if m <= size), rows[-1])
    cuts = [cut for cut in CUTS if cut.bits == bits and cut.rows == fitting and cut.shared <= shared]
    plans = [Plan(cut, blocks) for cut in cuts for blocks in block_counts(cut, m, n, k, multiprocessors, shared)]
    return min(plans, key=lambda p: cycles(p, m, n, k, multiprocessors))


def tiles_of(cut: Cut, m: int, n: int) -> int:
    """Parts of the output that a block owns at a time."""
    return -(-n // cut.outputs) * -(-m // cut.rows)


def units_of(cut: Cut, k: int) -> int:
    """Of K, padded as tiles are."""
    return -(-k // UNIT_K) * (UNIT_K // cut.unit_k)


def block_counts(cut: Cut, m: int, n: int, k: int, multiprocessors: int, shared: int) -> Sequence[int]:
    """A block for each tile, or for each of several equal parts of it, or just as many as the card holds."""
    tiles, units = tiles_of(cut, m, n), units_of(cut, k)
    held = multiprocessors * min(cut.resident, max(shared // (cut.shared + 1024), 1))
    several = [tiles * parts for parts in range(1, units + 1) if parts == 1 or tiles * parts <= held]
    return [*several, min(held, tiles * units)]


def cycles(p: Plan, m: int, n: int, k: int, multiprocessors: int) -> float:
    """What the model says: whichever is slowest of products, L2 and memory, for the multiprocessor with most to do."""
    cut, units = p.cut, units_of(p.cut, k)
    tiles = tiles_of(cut, m, n)
    weights, rows = cut.outputs * cut.unit_k * cut.bits / 8, min(m, cut.rows) * cut.unit_k * 2
    products = cut.outputs * cut.rows * cut.unit_k / 2048 * PRODUCT
    unit = max(products, (weights + rows) * BYTE_FROM_L2, weights * WEIGHT_BYTE)
    turns = -(-p.blocks // multiprocessors)
    share = tiles * units / p.blocks
    parts = p.blocks / tiles if p.blocks % tiles == 0 else max(p.blocks // tiles, 1) + 1
    adding = 0 if parts == 1 else ADD_PARTS + parts * cut.outputs * cut.rows * 4 * PART_BYTE
    pieces = max(share / units, 1)  # tiles that a block begins
    return turns * share * unit + START * (1 + 0.3 * (pieces - 1)) + adding


def w4_mma_block(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Four bits."""
    return _multiply("w4_mma_block", x, tiles, scales, n, group, bias, out)


def w3_mma_block(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    group: int,
    bias: Maybe = None,
    out: Maybe = None,
) -> torch.Tensor:
    """Three bits."""
    return _multiply("w3_mma_block", x, tiles, scales, n, group, bias, out)


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
    product = TILED[name]
    bits = product.bits
    limits = {"max_m": product.max_m, "max_n": MAX_INT - UNIT_N, "max_k": MAX_K}
    x = checked(name, bits, x, tiles, scales, n, group, bias, **limits)
    m, k = x.shape
    out = torch.empty(m, n, dtype=torch.float16, device=x.device) if out is None else out
    expect(name, "out", out, torch.float16, (m, n), x.device)
    device = x.device.index
    run(plan(bits, m, n, k, multiprocessors(device), max_shared(device)), x, tiles, scales, bias, out, group)
    return out


def run(
    chosen: Plan,
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    bias: Maybe,
    out: torch.Tensor,
    group: int,
) -> None:
    """Enqueue this plan, without a look at the operands."""
    (m, k), n, cut = x.shape, out.shape[1], chosen.cut
    parts = tiles_of(cut, m, n)
    require(parts * units_of(cut, k) <= MAX_INT, f"{cut.name}: M x N x K = {m} x {n} x {k} is too large")
    partial = arrived = None
    if chosen.blocks != parts:  # some tile has several blocks
        partial = torch.empty(2 * chosen.blocks, cut.rows, cut.outputs, dtype=torch.float32, device=x.device)
        arrived = counters(x.device.index).take(parts)
    tensors = (x, tiles, scales, bias, out, partial, arrived)
    launch_op(OPS[cut.name], (chosen.blocks,), tensors, m, n, k, group, shared=cut.shared)
