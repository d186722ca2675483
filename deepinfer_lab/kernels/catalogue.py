"""The CUDA kernels on weights as they are stored and the shapes of their launches, and the products that a linear layer can
take, by such a kernel, one on weights in tiles (`ops_catalogue`), or a kernel and cuBLAS. The launchers, the compiler, the
resource report and the tests all read these tables, so a kernel is described once.

All of `KERNELS` have one signature: (x, packed, scales, bias or null, out, m, n, k, group). Where K is split, `out` is the
float32 partial sums [splits, m, n], and the bias is left to the launch that adds them.
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
# Of a dense slice of a weight. On an H200, 32 MiB stay in the L2 between the launches that write and that read them; this gains
# up to 5% where N is large, and loses up to 20% where K is: cuBLAS then has few columns to spread over the card.
SLICE_BYTES = 160 * 2**20
SLICE_ROWS = 128  # slices are multiples of it: whole tiles for cuBLAS, and aligned outputs
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
        only: the one architecture that it is for, "sm_90", say, compiled with all that no other has; None: for every one.
    """

    name: str
    bits: int
    threads: int
    block_n: int
    block_m: int
    single_row: bool
    summary: str
    split_k: bool = False
    only: str | None = None

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


@dataclass(frozen=True)
class DequantiseProduct:
    """A product without a kernel of its own: a kernel of `ops_catalogue` makes rows of the weight dense, cuBLAS multiplies.

    Attributes:
        name: of the launcher. bits: 3 or 4. summary: what it does, in a few words.
        block_n: outputs by which a launch may reach past N: none. max_m: the largest M, since cuBLAS counts in 32 bits.
    """

    name: str
    bits: int
    summary: str
    block_n: int = 0
    max_m: int = 2**31 - 1

    def slice_rows(self, k: int) -> int:
        """Rows of the weight that are dense at a time."""
        return max(SLICE_BYTES // (2 * k) // SLICE_ROWS, 1) * SLICE_ROWS


@dataclass(frozen=True)
class MmaProduct:
    """A product on tensor cores whose kernel, one of several in `ops_catalogue`, its launcher chooses by M and the card.

    Attributes:
        name: of the launcher. bits: 3 or 4. summary: what it does, in a few words.
        max_m: the largest M: rows of a last block reach past it, by less than 256.
        capability: the only compute capability whose devices can run it; None: all that can run the others.
    """

    name: str
    bits: int
    summary: str
    max_m: int = 2**31 - 1 - 256
    capability: tuple[int, int] | None = None


# All that can multiply a weight as it is stored, by the name of its launcher.
PRODUCTS: MappingProxyType[str, Kernel | DequantiseProduct] = MappingProxyType(
    {
        **KERNELS,
        **{
            name: DequantiseProduct(name, bits, "dequantise a slice of the weight, then multiply with cuBLAS")
            for name, bits in (("w4_dequantise_cublas", 4), ("w3_dequantise_cublas", 3))
        },
    }
)


# The same for a weight in tiles (`quant/tiles.py`).
TILED = MappingProxyType(
    {
        f"w{bits}_{kind}": MmaProduct(
            f"w{bits}_{kind}", bits, f"{summary}, re-packed for tensor cores", capability=capability
        )
        for kind, summary, capability in (
            ("mma_small", "up to 32 rows share one read of the weights", None),
            ("mma_block", "up to 128 rows share one read of the weights", None),
            ("wide", "up to 256 rows share one read of the weights, on Hopper alone", (9, 0)),
        )
        for bits in (4, 3)
    }
)


def headers() -> tuple[Path, ...]:
    """The sources that kernels include, in a fixed order."""
    return tuple(sorted(SOURCES.glob("*.cuh")))
