"""The CUDA kernels that are no whole linear layer: attention over the paged cache, element-wise work, dequantising. Each has
its own arguments. Like `catalogue.KERNELS`, one `extern "C"` kernel to a source of the same name.
"""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from deepinfer_lab.kernels.catalogue import KERNELS, SOURCES, Kernel

HEAD_DIMS = (64, 80, 96, 128)  # that paged attention is compiled for
MIN_CAPABILITY = (8, 0)  # of a device for these kernels: cuda/mma.cuh


@dataclass(frozen=True)
class Op:
    """One kernel, in `cuda/<name>.cu`, its threads in a block, and what it does in a few words.

    dependent: it awaits the kernels before it by itself, so that it may be launched while they run.
    """

    name: str
    threads: int
    summary: str
    dependent: bool = False

    @property
    def source(self) -> Path:
        return SOURCES / f"{self.name}.cu"


def _decode_ops() -> tuple[Op, ...]:
    return tuple(
        Op(f"paged_decode_{stored}_{dim}", 128, f"attention of new tokens over {stored} K and V, head_dim {dim}", True)
        for stored in ("f16", "i8")
        for dim in HEAD_DIMS
    )


OPS = MappingProxyType(
    {
        op.name: op
        for op in (
            *_decode_ops(),
            Op("paged_combine", 128, "adds up the splits of paged_decode", True),
            Op("rms_norm", 256, "RMSNorm, and the residual addition before it", True),
            Op("rope_write_f16", 128, "rotary embedding; K and V into an fp16 cache", True),
            Op("rope_write_i8", 128, "rotary embedding; K and V into an int8 cache", True),
            Op("silu_mul", 256, "silu(gate) * up", True),
            Op("merge_attention", 256, "attention over parts of the keys to attention over all"),
            Op("spin", 1024, "occupies multiprocessors for a time, and says which"),
            Op("w4_dequantise", 256, "4-bit weights to dense fp16"),
            Op("w3_dequantise", 256, "3-bit weights to dense fp16"),
        )
    }
)

COMPILED: MappingProxyType[str, Kernel | Op] = MappingProxyType(
    {**KERNELS, **OPS}
)  # all that the compiler knows by name
