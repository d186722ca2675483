"""Every CUDA kernel of this package and the shape of its launch. The launchers, the compiler, the resource report and the tests
all read this table, so a kernel is described once.

All kernels share one signature: (x, packed, scales, bias or null, out, m, n, k, group). Where K is split, `out` is the float32
partial sums [splits, m, n], and the bias is left to the launch that adds them.
"""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SOURCES = Path(__file__).parent / "cuda"
GROUPS = (32, 64, 128)
ADD_PARTIALS = "add_partials"  # in the module of every kernel that splits K: (partial, bias or null, out, m, n, splits)
SPLIT_STEP = 32  # K is split in whole tiles
MAX_SPLITS = 8  # on the H200 sixteen gain up to 15% on the longest K, and double the partial sums' memory
BLOCKS_PER_SM = 8  # that splitting aims at: as many of these blocks as a multiprocessor can hold
MAX_GRID_Y = 65535  # CUDA Programming Guide, technical specifications: maximum y-dimension of a grid


@dataclass(frozen=True)
class Kernel:
    """One `extern "C"` kernel, in `cuda/<name>.cu`.

    Attributes:
        name: of the kernel and of its source. bits: 3 or 4.
        threads: in a block. block_n, block_m: outputs of one block along N and along M.
        single_row: it computes one activation row and no more.
        summary: what it does, in a few words.
        split_k: blocks along the grid's z share outputs, each with a part of K.
    """

    name: str
    bits: int
    threads: int
    block_n: int
    block_m: int
    single_row: bool
    summary: str
    split_k: bool = False

    @property
    def max_m(self) -> int:
        """The largest M of one launch."""
        if self.single_row:
            return 1
        return MAX_GRID_Y if self.split_k else MAX_GRID_Y * self.block_m  # partial sums are added a row to a block

    @property
    def source(self) -> Path:
        return SOURCES / f"{self.name}.cu"

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Blocks along N (x) and along M (y)."""
        return -(-n // self.block_n), -(-m // self.block_m)

    def splits(self, n: int, k: int, multiprocessors: int) -> int:
        """Parts of K. They depend on the weight and the card, not on M: a row's result does not depend on its batch."""
        if not self.split_k:
            return 1
        wanted = -(-BLOCKS_PER_SM * multiprocessors // self.grid(1, n)[0])
        return min(wanted, MAX_SPLITS, k // SPLIT_STEP)


KERNELS = MappingProxyType(
    {
        kernel.name: kernel
        for kernel in (
            Kernel("w4_gemv", 4, 256, 16, 1, True, "one row; a warp for every two outputs"),
            Kernel("w3_gemv", 3, 256, 16, 1, True, "one row; a warp for every two outputs"),
            Kernel("w4_gemv_batch_tile", 4, 256, 16, 8, False, "up to 8 rows share one read of the weights"),
            Kernel("w3_gemv_grid_y", 3, 256, 16, 1, False, "each row reads the weights again"),
            Kernel("w3_gemv_batch_tile", 3, 128, 4, 8, False, "experiment: a block keeps 8 groups of accumulators"),
            Kernel("w3_gemv_warp_tile", 3, 256, 16, 8, False, "experiment: w4_gemv_batch_tile's layout at 3 bits"),
            Kernel("w4_tiled_gemm", 4, 256, 64, 32, False, "32 x 64 x 32 tiles through shared memory"),
            Kernel("w3_tiled_gemm", 3, 256, 64, 32, False, "32 x 64 x 32 tiles through shared memory"),
            Kernel(
                "w4_tiled_gemm_split_k", 4, 256, 64, 32, False, "w4_tiled_gemm with blocks that share K", split_k=True
            ),
            Kernel(
                "w3_tiled_gemm_split_k", 3, 256, 64, 32, False, "w3_tiled_gemm with blocks that share K", split_k=True
            ),
        )
    }
)


def headers() -> tuple[Path, ...]:
    """The sources that kernels include, in a fixed order."""
    return tuple(sorted(SOURCES.glob("*.cuh")))
