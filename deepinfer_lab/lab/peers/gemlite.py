"""GemLite (the distribution `gemlite`): kernels in Triton, tuned when a shape is first seen. It has no 3 bits."""

from collections.abc import Callable

import torch

from deepinfer_lab.lab.peers.peer import Distributed
from deepinfer_lab.quant.layout import PackedWeight, unpack

UNIT_K = 32
OFFSET = 8  # of a stored value


class GemLite(Distributed):
    """A `Peer`. Weights are (value - 8) * scale, scales float16."""

    name = "gemlite"
    distribution = "gemlite"
    dtype = torch.float16

    def refusal(self, bits: int, n: int, k: int, group: int) -> str | None:
        if bits != 4:
            return f"of our bits it takes 4, not {bits}"
        return f"K must be a multiple of {UNIT_K}" if k % UNIT_K else None

    def prepare(self, weight: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        from gemlite import DType, GemLiteLinear

        layer = GemLiteLinear(
            weight.bits,
            group_size=weight.group,
            in_features=weight.k,
            out_features=weight.n,
            input_dtype=DType.FP16,
            output_dtype=DType.FP16,
        )
        layer.pack(stored_values(weight), weight.scales, OFFSET, None)
        return layer


def stored_values(weight: PackedWeight) -> torch.Tensor:
    """uint8 [N, K]: a value a byte, as q + 8, which the layer packs itself."""
    return (unpack(weight.packed, weight.bits, weight.k) + OFFSET).to(torch.uint8)
