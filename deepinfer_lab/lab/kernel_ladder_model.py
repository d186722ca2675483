"""What each rung of the ladder should take, by counting bytes and instructions: to be read before it is measured.

A launch takes what an empty one takes, and then as long as the slowest of

    memory         weights, scales, activations and outputs, each once, over the measured bandwidth
    L2             what blocks fetch again
    shared memory  a warp's turns, one a cycle of each multiprocessor
    instructions   of warps, four a cycle of each multiprocessor
    tensor cores   FLOPs, over the rate of a large product; of mma.sync, products over the rate of those

None of these is late, waits or overlaps badly, so a prediction is about the best that a design can do. By how much a kernel
misses it is what the ladder is about.

Instructions are those of a main loop as NVRTC 13 compiles it for sm_90 (`nvdisasm`), over the weights or fragments in it.
"""

from dataclasses import dataclass
from types import MappingProxyType

from deepinfer_lab.kernels import maps
from deepinfer_lab.kernels.catalogue import KERNELS, PRODUCTS, DequantiseProduct
from deepinfer_lab.kernels.mma_block import BYTE_FROM_L2, PRODUCT
from deepinfer_lab.kernels.mma_cuts import CUTS
from deepinfer_lab.metrics import roofline
from deepinfer_lab.metrics.footprint import linear_bytes

SCHEDULERS = 4  # of a multiprocessor, since Volta; each issues one instruction of a warp in a cycle
# Of a GEMV, for one weight: to fetch and decode it, and for each row of activations. Two outputs of a warp share a row's
# activations; in w3_gemv_batch_tile, four.
GEMV = MappingProxyType(
    {
        "w4_gemv": (3.1, 2.1),
        "w3_gemv": (3.6, 2.1),
        "w4_gemv_batch_tile": (3.1, 2.1),
        "w3_gemv_grid_y": (3.6, 2.1),
        "w3_gemv_warp_tile": (3.6, 2.1),
        "w3_gemv_batch_tile": (3.6, 1.6),
    }
)
BATCH_TILE = 8  # rows that share a reading, in kernels of that name and in warp tiles
CONVERSIONS, FMAS = (
    6,
    8,
)  # of the tiled kernels, a warp for one k: six values become float32, two rows meet four outputs
# Of mma_small, a warp for a unit of 16 x 128 weights: to fetch and decode it, by bits, and for every 8 rows.
UNIT_N, UNIT_K, ROWS = 16, 128, 8
UNIT, UNIT_ROWS = {4: 88, 3: 102}, 22
SMALL_ROWS, SMALL_OUTPUTS = (8, 16, 32), 32  # of a block: one of these, and at most
# Of mma_block, a warp for 16 x 16 weights: to fetch, decode and scale them, and for every 8 rows.
FRAGMENT, FRAGMENT_ROWS, WARP_ROWS = 20, 1.8, 64


@dataclass(frozen=True)
class Card:
    """What predictions are made of. Bytes and FLOPs per second: measured, the latter of a large fp16 product. launch_us: of an
    empty kernel in a graph. hertz: the highest clock of a multiprocessor."""

    bytes_per_s: float
    flops_per_s: float
    launch_us: float
    multiprocessors: int
    hertz: float

    def cycles(self, count: float) -> float:
        """Seconds that take so many cycles of multiprocessors, spread over all of them."""
        return count / self.multiprocessors / self.hertz


@dataclass(frozen=True)
class Cell:
    """x[M, K] @ weight[N, K].T; bits 16 and no group for a dense weight."""

    bits: int
    m: int
    n: int
    k: int
    group: int | None

    @property
    def cost(self) -> roofline.Cost:
        """FLOPs, and bytes that must pass."""
        return roofline.product(self.n, self.k, self.m, self.bits if self.bits < 16 else None, self.group or 0)

    @property
    def units(self) -> int:
        """Of 16 x 128 weights, those at the ends filled up."""
        return -(-self.n // UNIT_N) * -(-self.k // UNIT_K)

    def passes(self, rows: int) -> int:
        """Times that the weights are read by blocks of so many rows."""
        return -(-self.m // rows)


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a launch, and which of the limits sets them."""

    us: float
    bound: str


Limits = dict[str, float]  # seconds by limit


def predict(kernel: str, cell: Cell, card: Card) -> Prediction:
    """For a name of `kernel_cells.kernels_for`. One that has no model of its own gets the roofline: memory and tensor cores."""
    limits, launches = _roof(cell, card), 1
    if kernel in KERNELS:
        del limits["tensor cores"]
        limits |= _gemv(kernel, cell, card) if kernel in GEMV else _tiled(kernel, cell, card)
        launches += KERNELS[kernel].split_k
    elif isinstance(PRODUCTS.get(kernel), DequantiseProduct):
        limits = _dequantise(cell, card)
        launches = 2 * -(-cell.n // PRODUCTS[kernel].slice_rows(cell.k))
    elif kernel.endswith("_mma_small"):
        limits |= _small(cell, card)
    elif kernel.endswith("_mma_block"):
        limits |= _block(cell, card)
    bound = max(limits, key=lambda limit: limits[limit])
    return Prediction(launches * card.launch_us + limits[bound] * 1e6, bound)


def _roof(cell: Cell, card: Card) -> Limits:
    return {"memory": cell.cost.bytes / card.bytes_per_s, "tensor cores": cell.cost.flops / card.flops_per_s}


def _gemv(kernel: str, cell: Cell, card: Card) -> Limits:
    decode, row = GEMV[kernel]
    again = cell.passes(BATCH_TILE if kernel.endswith("_tile") else 1)
    instructions = cell.n * cell.k * (decode * again + row * cell.m) / maps.WARP
    return {"instructions": card.cycles(instructions / SCHEDULERS)}


def _tiled(kernel: str, cell: Cell, card: Card) -> Limits:
    """As notebook 01 has it: the multiprocessor with the most blocks decides."""
    own, reads = KERNELS[kernel], maps.wide()
    across, down = own.grid(cell.m, cell.n)
    splits = own.splits(cell.n, cell.k, card.multiprocessors)
    rounds = -(-across * down * splits // card.multiprocessors)
    warps = rounds * cell.k / splits * maps.THREADS / maps.WARP  # times k that they walk along
    turns = sum(read.turns for read in reads) / maps.BK
    issued = (len(reads) / maps.BK + CONVERSIONS + FMAS) / SCHEDULERS
    return {"shared memory": warps * turns / card.hertz, "instructions": warps * issued / card.hertz}


def _dequantise(cell: Cell, card: Card) -> Limits:
    """Packed weights are read and dense ones written; then cuBLAS reads those, or computes for longer."""
    dense = Cell(16, cell.m, cell.n, cell.k, None)
    packed = sum(linear_bytes(cell.n, cell.k, cell.bits, cell.group))
    first = (packed + 2 * cell.n * cell.k) / card.bytes_per_s
    return {limit: first + seconds for limit, seconds in _roof(dense, card).items()}


def _small(cell: Cell, card: Card) -> Limits:
    again = cell.passes(SMALL_ROWS[-1])
    tiles = next((rows for rows in SMALL_ROWS if cell.m <= rows), SMALL_ROWS[-1]) // ROWS
    weights = cell.units * UNIT_N * UNIT_K * cell.bits / 8 * again
    activations = -(-cell.n // SMALL_OUTPUTS) * cell.m * cell.k * 2
    return {
        "L2": card.cycles((weights + activations) * BYTE_FROM_L2),
        "instructions": card.cycles(cell.units * again * (UNIT[cell.bits] + UNIT_ROWS * tiles) / SCHEDULERS),
        "tensor cores": card.cycles(cell.units * again * tiles * UNIT_K / 16 * PRODUCT),
    }


def _block(cell: Cell, card: Card) -> Limits:
    sizes = sorted({cut.rows for cut in CUTS})
    rows = next((size for size in sizes if cell.m <= size), sizes[-1])
    again, tiles = cell.passes(rows), rows // ROWS
    decoded = max(rows // WARP_ROWS, 1)  # times, by warps of one block
    fragments = cell.units * UNIT_K / 16 * again
    instructions = fragments * (decoded * FRAGMENT + tiles * FRAGMENT_ROWS)
    weights = cell.units * UNIT_N * UNIT_K * cell.bits / 8 * again
    activations = -(-cell.n // max(cut.outputs for cut in CUTS)) * cell.m * cell.k * 2
    return {
        "L2": card.cycles((weights + activations) * BYTE_FROM_L2),
        "instructions": card.cycles(instructions / SCHEDULERS),
        "tensor cores": card.cycles(fragments * tiles * PRODUCT),
    }
