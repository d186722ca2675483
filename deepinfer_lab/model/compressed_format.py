"""compressed-tensors checkpoints in the format "pack-quantized": symmetric 4-bit integers, a scale per group.

A layer [N, K] has `weight_packed` int32 [N, K / 8], each word eight values q + 8, the first in its low nibble;
`weight_scale` [N, K / group]; `weight_shape`, the integers N and K; and, where groups were formed by activation,
`weight_g_idx` int32 [K], the group of each input channel.
Source: `pack_to_int32` in https://github.com/vllm-project/compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.few_bit_format import INT32, SCALES, Part, float16_scales, from_offset, setting, words
from deepinfer_lab.quant.layout import GROUPS, PackedWeight

# What a decoder would have to do beside multiplying with the weights.
EXTRAS = ("kv_cache_scheme", "transform_config")


@dataclass(frozen=True)
class CompressedFormat:
    """pack-quantized layers of one checkpoint."""

    group: int
    bits: int = 4
    channel_groups: str = "weight_g_idx"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], path: Path) -> "CompressedFormat":
        """From the `quantization_config` in the `config.json` at `path`.

        Raises:
            CheckpointError, UnsupportedArchitecture: a setting is malformed, or not among those supported.
        """
        setting(settings, "format", ("pack-quantized",), path)
        for key in EXTRAS:
            if settings.get(key):
                raise UnsupportedArchitecture(f"{path}: quantization_config has a {key}, supported are those without")
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(scheme, dict) for scheme in groups.values()):
            raise CheckpointError(f"{path}: config_groups is {groups!r}, expected an object of objects")
        if len(groups) != 1:
            raise UnsupportedArchitecture(f"{path}: {len(groups)} config_groups, supported is one for all layers")
        (scheme,) = groups.values()
        for key in ("input_activations", "output_activations"):
            if scheme.get(key):
                raise UnsupportedArchitecture(f"{path}: {key} are quantised, supported are models of quantised weights")
        weights = scheme.get("weights")
        if not isinstance(weights, dict):
            raise CheckpointError(f"{path}: config_groups have weights {weights!r}, expected an object")
        for key, value in {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}.items():
            setting(weights, key, (value,), path)
        return cls(setting(weights, "group_size", GROUPS, path))

    def parts(self, n: int, k: int) -> dict[str, Part]:
        return {
            "weight_packed": Part((n, words(k, 4)), INT32),
            "weight_scale": Part((n, k // self.group), SCALES),
            "weight_shape": Part((2,), ("I64", "I32")),
            "weight_g_idx": Part((k,), INT32, required=False),
        }

    def weight(self, layer: str, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> PackedWeight:
        shape = tensors["weight_shape"].tolist()
        if shape != [n, k]:
            raise CheckpointError(f"{layer}: weight_shape is {shape}, expected {[n, k]}")
        packed = from_offset(tensors["weight_packed"], 4)
        return PackedWeight(4, self.group, n, k, packed, float16_scales(layer, tensors["weight_scale"]))
