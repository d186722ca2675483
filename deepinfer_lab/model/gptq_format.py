"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them.

A layer [N, K] has `qweight` int32 [K * bits / 32, N], whose columns are little-endian streams of q + zero along K (in 3 bits
a value may straddle two words); `qzeros` int32 [K / group, N * bits / 32], the same along N; `scales` [K / group, N]; and
`g_idx` int32 [K], the group of each input channel. Format "gptq" stores each zero point less one, "gptq_v2" as it is.
Source: `QuantLinear.pack` in https://github.com/AutoGPTQ/AutoGPTQ, and the conversion of the older format to the newer one
in https://github.com/ModelCloud/GPTQModel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.few_bit_format import (
    INT32,
    SCALES,
    Part,
    check_zero_points,
    float16_scales,
    from_offset,
    setting,
    words,
)
from deepinfer_lab.quant.layout import BITS, GROUPS, PackedWeight, unpack

ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class GptqFormat:
    """GPTQ layers of one checkpoint.

    Attributes:
        zero_offset: what to add to a stored zero point.
        act_order: whether channels were grouped by activation, so that `g_idx` must be there.
    """

    bits: int
    group: int
    zero_offset: int
    act_order: bool
    channel_groups: str = "g_idx"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], path: Path) -> "GptqFormat":
        """From the `quantization_config` in the `config.json` at `path`.

        Raises:
            CheckpointError, UnsupportedArchitecture: a setting is malformed, or not among those supported.
        """
        bits = setting(settings, "bits", BITS, path)
        group = setting(settings, "group_size", GROUPS, path)
        setting(settings, "pack_dtype", ("int32",), path, "int32")
        layout = setting(settings, "checkpoint_format", tuple(ZERO_OFFSETS), path, "gptq")
        _refuse_overrides(settings.get("dynamic") or {}, {"bits": bits, "group_size": group}, path)
        return cls(bits, group, ZERO_OFFSETS[layout], bool(settings.get("desc_act")))

    def parts(self, n: int, k: int) -> dict[str, Part]:
        groups = k // self.group
        return {
            "qweight": Part((words(k, self.bits), n), INT32),
            "qzeros": Part((groups, words(n, self.bits)), INT32),
            "scales": Part((groups, n), SCALES),
            "g_idx": Part((k,), INT32, required=self.act_order),
        }

    def weight(self, layer: str, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> PackedWeight:
        stored = unpack(tensors["qzeros"].view(torch.uint8), self.bits, n) & ((1 << self.bits) - 1)
        check_zero_points(layer, stored + self.zero_offset, self.bits)
        packed = from_offset(tensors["qweight"].T, self.bits)
        return PackedWeight(self.bits, self.group, n, k, packed, float16_scales(layer, tensors["scales"].T))


def _refuse_overrides(dynamic: Any, base: dict[str, int], path: Path) -> None:
    """Refuse GPTQModel's settings by layer where they change the layout. A pattern `-:...` leaves layers dense."""
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{path}: quantization_config has dynamic {dynamic!r}, expected an object")
    for pattern, override in dynamic.items():
        if pattern.startswith("-:") or not isinstance(override, dict):
            continue
        changed = {key: override[key] for key in base if override.get(key, base[key]) != base[key]}
        if changed:
            raise UnsupportedArchitecture(
                f"{path}: layers '{pattern}' have {changed}, supported is {base} in every layer"
            )
