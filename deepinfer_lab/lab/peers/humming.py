"""Humming (the distribution `humming-kernels`): kernels for weights of any few bits, compiled when first used."""

from collections.abc import Callable

import torch

from deepinfer_lab.lab.peers.peer import Distributed
from deepinfer_lab.quant.layout import PackedWeight

UNIT_N, UNIT_K = 64, 32  # what its re-packing takes without padding
# The sign bits of packed values, a byte of the period each: q + 2**(bits - 1) is q with its sign bit turned round.
SIGNS = {3: (0x24, 0x49, 0x92), 4: (0x88,)}


class Humming(Distributed):
    """A `Peer`. Weights are (value - 2**(bits - 1)) * scale, scales float16."""

    name = "humming"
    distribution = "humming-kernels"
    dtype = torch.float16

    def refusal(self, bits: int, n: int, k: int, group: int) -> str | None:
        if bits not in SIGNS:
            return f"it is asked for {' and '.join(map(str, SIGNS))} bits, not {bits}"
        return f"N must be a multiple of {UNIT_N} and K one of {UNIT_K}" if n % UNIT_N or k % UNIT_K else None

    def prepare(self, weight: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        from humming.layer import HummingLayer

        config = {"dtype": f"int{weight.bits}", "group_size": weight.group}
        layer = HummingLayer(shape_n=weight.n, shape_k=weight.k, weight_config=config, torch_dtype=torch.float16)
        layer = layer.to(weight.packed.device)
        layer.load_from_tensors(operands(weight))
        layer.transform()
        return layer


def operands(weight: PackedWeight) -> dict[str, torch.Tensor]:
    """`weight`: int32 [N, K * bits / 32], a stream of bits, the first value lowest; `weight_scale`: float16 [N, K / group]."""
    signs = torch.tensor(SIGNS[weight.bits], dtype=torch.uint8, device=weight.packed.device)
    flipped = weight.packed ^ signs.repeat(weight.packed.shape[1] // len(signs))
    return {"weight": flipped.view(torch.int32), "weight_scale": weight.scales}
