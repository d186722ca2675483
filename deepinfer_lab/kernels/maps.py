"""Who does what in the tiled kernels, as arrays: the index formulas of `cuda/tiled_gemm.cuh` and `cuda/unpack_w?_tile.cuh`.

A thread is its number in the block of 256. k and n count within the tile of 32 x 64 weights, m within its 32 rows.
"""

from dataclasses import dataclass

import numpy as np

from deepinfer_lab.errors import KernelError

BM, BN, BK, THREADS, WARP = 32, 64, 32, 256, 32
PADDED, UNPADDED = BN + 1, BN  # halves from one k to the next in shared_b
BANKS, WORD_HALVES = 32, 2  # shared memory: 32 banks of 4-byte words, two halves in each


@dataclass(frozen=True)
class UnpackMap:
    """What each thread writes to shared_b, in the order of its stores, and from which bytes.

    Attributes (all int [256, stores], 8 stores a thread):
        k, n: the cell written. first_byte, last_byte: of the row's packed bytes in this tile, those that hold the value; they
        differ where a 3-bit value straddles two bytes.
    """

    k: np.ndarray
    n: np.ndarray
    first_byte: np.ndarray
    last_byte: np.ndarray


@dataclass(frozen=True)
class CellMap:
    """Cells that each thread owns: row and column, int [256, cells]."""

    row: np.ndarray
    column: np.ndarray


def unpack_map(bits: int) -> UnpackMap:
    """The map of `UnpackW4` or `UnpackW3`.

    Raises:
        KernelError: bits not 3 or 4.
    """
    thread, store = np.arange(THREADS)[:, None], np.arange(8)[None, :]
    lane, warp = thread % WARP, thread // WARP
    if bits == 4:  # a warp takes two rows in each of four passes; a lane takes one byte: an even k, then an odd one
        k = 2 * (lane % 16) + store % 2
        n = store // 2 * 16 + warp * 2 + lane // 16
    elif bits == 3:  # a warp takes eight rows; a lane takes one unit of eight values
        k = (lane & 3) * 8 + store
        n = warp * 8 + (lane >> 2) + 0 * store
    else:
        raise KernelError(f"{bits} bits: tiled kernels exist for 3 and 4")
    return UnpackMap(k, n, k * bits // 8, (k * bits + bits - 1) // 8)


def activation_map() -> CellMap:
    """Cells (m, k) of shared_a that each thread fills: four in a row, one 8-byte load."""
    thread, i = np.arange(THREADS)[:, None], np.arange(4)[None, :]
    return CellMap(thread // 8 + 0 * i, thread % 8 * 4 + i)


def output_map() -> CellMap:
    """Outputs (m, n) of each thread: two rows, four columns."""
    thread, i = np.arange(THREADS)[:, None], np.arange(8)[None, :]
    return CellMap(thread // 16 * 2 + i // 4, thread % 16 * 4 + i % 4)


def conflict_ways(halves: np.ndarray) -> np.ndarray:
    """How many turns each access takes: the largest number of different words that one bank must deliver.

    Args:
        halves: [..., 32] element offsets of the lanes of one warp in one access.

    Returns:
        int [...]: 1 where there is no conflict. Lanes in the same word share a turn.
    """
    ways = [_ways(lanes // WORD_HALVES) for lanes in halves.reshape(-1, WARP)]
    return np.array(ways).reshape(halves.shape[:-1])


def _ways(words: np.ndarray) -> int:
    return int(np.bincount(np.unique(words) % BANKS).max())


def b_write_offsets(bits: int, stride: int = PADDED) -> np.ndarray:
    """Element offsets in shared_b of the unpacking stores: [8 warps, 8 stores, 32 lanes]."""
    cells = unpack_map(bits)
    return (cells.k * stride + cells.n).reshape(-1, WARP, 8).transpose(0, 2, 1)


@dataclass(frozen=True)
class Read:
    """One read of the multiplication by all warps: `first`, int [8 warps, 32 lanes], where each lane's begins, as an offset
    in elements, and `halves`, how many elements it takes."""

    first: np.ndarray
    halves: int

    @property
    def turns(self) -> int:
        """Turns of the busiest warp. Reads of up to four bytes serve all lanes at once; of more, the two halves of a warp in
        turn, each as often as its bank conflicts ask for. Nsight Compute's wavefronts on an H200 are these: 3.0 for each k."""
        served = WARP if self.halves <= WORD_HALVES else WARP // 2
        groups = self.first.reshape(-1, WARP // served, served)
        words = groups[..., None] // WORD_HALVES + np.arange(-(-self.halves // WORD_HALVES))
        return max(sum(_ways(group.ravel()) for group in warp) for warp in words)


def _read(row: np.ndarray, column: np.ndarray, stride: int, halves: int) -> Read:
    return Read((row * stride + column).reshape(-1, WARP), halves)


def one_by_one() -> list[Read]:
    """The reads of a tile's multiplication as the article counts them (section 2.2): for each k two activations and four
    weights."""
    thread = np.arange(THREADS)
    return [
        read
        for k in range(BK)
        for read in (
            *(_read(thread // 16 * 2 + i, k, BK, 1) for i in range(2)),
            *(_read(k, thread % 16 * 4 + j, PADDED, 1) for j in range(4)),
        )
    ]


def wide() -> list[Read]:
    """The same values in the fewest reads that alignment allows: `multiply` and `load_b` of `cuda/tiled_gemm.cuh`."""
    thread = np.arange(THREADS)
    row, column = thread // 16 * 2, thread % 16 * 4
    pieces = {0: [(0, 4)], 1: [(0, 1), (1, 2), (3, 1)], 2: [(0, 2), (2, 2)], 3: [(0, 1), (1, 2), (3, 1)]}  # by k % 4
    activations = [_read(row + i, k, BK, 8) for k in range(0, BK, 8) for i in range(2)]
    weights = [_read(k, column + j, PADDED, halves) for k in range(BK) for j, halves in pieces[k % 4]]
    return activations + weights


def shared_bytes() -> dict[str, int]:
    """The shared-memory budget of a block, in bytes."""
    return {"shared_a": BM * BK * 2, "shared_b": BK * PADDED * 2}
