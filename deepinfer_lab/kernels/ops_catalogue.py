"""All other CUDA kernels: on weights in tiles, attention over the paged cache, element-wise work, dequantising, a whole decode
step. Each has its own arguments. Like `catalogue.KERNELS`, one `extern "C"` kernel to a source of the same name.
"""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from deepinfer_lab.kernels.catalogue import KERNELS, SOURCES, Kernel
from deepinfer_lab.kernels.mma_cuts import CUTS
from deepinfer_lab.kernels.wide_cuts import WIDE_CUTS

HEAD_DIMS = (64, 80, 96, 128)  # that paged attention is compiled for
MMA_ROWS = (8, 16, 32)  # activation rows of a block on tensor cores
CHAIN_BITS = ((4, 4), (4, 3), (3, 3))  # of a decode step in one launch: of its weights, in attention and in the MLP
MIN_CAPABILITY = (8, 0)  # of a device for these kernels: cuda/mma.cuh


@dataclass(frozen=True)
class Op:
    """One kernel, in `cuda/<name>.cu`.

    Attributes:
        name: of the kernel and of its source. threads: in a block.
        summary: what it does, in a few words.
        shared: a launch gives it more shared memory than it declares.
        dependent: it awaits the kernels before it by itself, so that it may be launched while they run.
        only: as `catalogue.Kernel`'s.
        together: its blocks wait for one another, so all must be resident at once.
    """

    name: str
    threads: int
    summary: str
    shared: bool = False
    dependent: bool = False
    only: str | None = None
    together: bool = False

    @property
    def source(self) -> Path:
        return SOURCES / f"{self.name}.cu"


def _decode_ops() -> tuple[Op, ...]:
    return tuple(
        Op(
            f"paged_decode_{stored}_{dim}",
            128,
            f"attention of new tokens over {stored} K and V, head_dim {dim}",
            dependent=True,
        )
        for stored in ("f16", "i8")
        for dim in HEAD_DIMS
    )


def _mma_ops() -> tuple[Op, ...]:
    """Products of a few rows, and those that make the RMSNorm of their rows first."""
    rows = {
        "8": 512,
        "8_pair": 512,
        "8_many": 256,
        "16": 512,
        "16_pair": 512,
        "16_many": 256,
        "32": 512,
        "32_many": 256,
    }
    return tuple(
        Op(
            f"w{bits}_mma_{kind}{norm}",
            threads,
            f"{'norm of ' if norm else ''}rows (up to {kind.split('_')[0]}) times {bits}-bit weights in tiles",
            shared=bool(norm),
            dependent=True,
        )
        for norm in ("", "_norm")
        for bits in (4, 3)
        for kind, threads in rows.items()
        if not norm or kind.startswith("8")
    )


OPS = MappingProxyType(
    {
        op.name: op
        for op in (
            *_decode_ops(),
            Op("rms_norm", 256, "RMSNorm, and the residual addition before it", dependent=True),
            Op("rope_write_f16", 128, "rotary embedding; K and V into an fp16 cache", dependent=True),
            Op("rope_write_i8", 128, "rotary embedding; K and V into an int8 cache", dependent=True),
            Op("silu_mul", 256, "silu(gate) * up", dependent=True),
            Op("merge_attention", 256, "attention over parts of the keys to attention over all"),
            Op("spin", 1024, "occupies multiprocessors for a time, and says which"),
            Op("w4_dequantise", 256, "4-bit weights to dense fp16"),
            Op("w3_dequantise", 256, "3-bit weights to dense fp16"),
            *_mma_ops(),
            *(
                Op(
                    cut.name,
                    cut.threads,
                    f"blocks of {cut.rows} rows times {cut.bits}-bit weights in tiles",
                    shared=True,
                    dependent=True,
                )
                for cut in CUTS
            ),
            Op("w4_dequantise_tiles", 256, "4-bit weights in tiles to dense fp16"),
            Op("w3_dequantise_tiles", 256, "3-bit weights in tiles to dense fp16"),
            Op("embed", 256, "embedding rows of tokens, also of those that only the device knows", dependent=True),
            Op("fetch", 256, "numbers out of pinned host memory"),
            Op("likeliest", 256, "of each row of logits the largest, and its token", dependent=True),
            Op("dense_rows", 256, "up to four rows times dense fp16 weights", shared=True, dependent=True),
            *(
                Op(
                    f"decode_chain_w{attention}_w{mlp}",
                    544,
                    f"a decode step of one sequence, {attention} bits in attention and {mlp} in the MLP, for sm_90 alone",
                    shared=True,
                    only="sm_90",
                    together=True,
                )
                for attention, mlp in CHAIN_BITS
            ),
            Op(
                "arrange_rows",
                128,
                "rows in the order in which some wide kernels copy them",
                dependent=True,
                only="sm_90",
            ),
            *(
                Op(
                    cut.name,
                    cut.threads,
                    f"blocks of {cut.rows} {'arranged ' * cut.arranged}rows times {cut.bits}-bit weights in tiles, for sm_90",
                    shared=True,
                    dependent=True,
                    only="sm_90",
                )
                for cut in WIDE_CUTS
            ),
        )
    }
)

COMPILED: MappingProxyType[str, Kernel | Op] = MappingProxyType(
    {**KERNELS, **OPS}
)  # all that the compiler knows by name


def runs_on(kernel: Kernel | Op, arch: str) -> bool:
    """Whether it can be compiled for this architecture, "sm_86", say."""
    return kernel.only in (None, arch)
