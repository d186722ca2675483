"""tinygemm: the 4-bit product in torch itself, `torch._weight_int4pack_mm`.

Activations, scales and results are bfloat16: rounding them, which counts as its error here, costs about 2e-3.
"""

from collections.abc import Callable

import torch

from deepinfer_lab.quant.layout import PackedWeight

INNER_TILES = 8  # tiles of 16 values along K that are packed together: 2, 4 or 8; 8 needs K to be a multiple of 128
UNIT_N, UNIT_K = 8, 16 * INNER_TILES
GROUPS = (32, 64, 128, 256)
OFFSET = 8  # of a stored value


class TinyGemm:
    """A `Peer`. Weights are (value - 8) * scale + zero, a zero of 0 for ours."""

    name = "tinygemm"
    dtype = torch.bfloat16
    kernel = "_weight_int4pack_mm"

    def missing(self) -> str | None:
        known = hasattr(torch.ops.aten, "_weight_int4pack_mm") and hasattr(
            torch.ops.aten, "_convert_weight_to_int4pack"
        )
        return None if known else f"torch {torch.__version__} has no _weight_int4pack_mm"

    def refusal(self, bits: int, n: int, k: int, group: int) -> str | None:
        if bits != 4:
            return f"it takes 4 bits, not {bits}"
        if n % UNIT_N or k % UNIT_K:
            return f"N must be a multiple of {UNIT_N} and K one of {UNIT_K}"
        return None if group in GROUPS else f"the group must be one of {', '.join(map(str, GROUPS))}"

    def prepare(self, weight: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        values, scales_and_zeros = operands(weight)
        tiles = torch.ops.aten._convert_weight_to_int4pack(values, INNER_TILES)
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, tiles, weight.group, scales_and_zeros)


def operands(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, uint8 [N, K / 2] with the even k in the high nibble, as q + 8; and bfloat16 [K / group, N, 2]: scale, zero."""
    swapped = (weight.packed & 0xF) << 4 | weight.packed >> 4
    scales = weight.scales.bfloat16().t()
    return swapped ^ (OFFSET << 4 | OFFSET), torch.stack([scales, torch.zeros_like(scales)], dim=2).contiguous()
