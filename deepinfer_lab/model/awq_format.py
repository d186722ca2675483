"""AWQ checkpoints as AutoAWQ writes them in its version "gemm", 4 bits.

A layer [N, K] has `qweight` int32 [K, N / 8], each word eight values q + zero of one input channel; `qzeros` int32
[K / group, N / 8] in the same order; and `scales` [K / group, N]. Nibble i of a word, from the low end, belongs to row
ROWS[i] of its eight. Source: `WQLinear_GEMM.from_linear` in https://github.com/casper-hansen/AutoAWQ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_lab.model.few_bit_format import INT32, SCALES, Part, check_zero_points, float16_scales, setting, words
from deepinfer_lab.quant.layout import GROUPS, PackedWeight, pack, unpack

ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AwqFormat:
    """AWQ layers of one checkpoint. Input channels stay in order, so that there are no channel groups to read."""

    group: int
    bits: int = 4
    channel_groups: None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], path: Path) -> "AwqFormat":
        """From the `quantization_config` in the `config.json` at `path`.

        Raises:
            UnsupportedArchitecture: a setting is not among those supported.
        """
        setting(settings, "bits", (4,), path)
        setting(settings, "version", ("gemm", "GEMM"), path, "gemm")
        return cls(setting(settings, "group_size", GROUPS, path))

    def parts(self, n: int, k: int) -> dict[str, Part]:
        groups = k // self.group
        return {
            "qweight": Part((k, words(n, 4)), INT32),
            "qzeros": Part((groups, words(n, 4)), INT32),
            "scales": Part((groups, n), SCALES),
        }

    def weight(self, layer: str, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> PackedWeight:
        check_zero_points(layer, _nibbles(tensors["qzeros"]), 4)
        packed = pack(_nibbles(tensors["qweight"]).T - 8, 4)
        return PackedWeight(4, self.group, n, k, packed, float16_scales(layer, tensors["scales"].T))


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] -> int8 [R, N], values 0 to 15 in the order of N."""
    as_stored = unpack(stored.view(torch.uint8), 4, stored.shape[1] * 8) & 0xF
    return as_stored.unflatten(1, (-1, 8))[..., [ROWS.index(row) for row in range(8)]].flatten(1)
