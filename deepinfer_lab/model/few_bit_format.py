"""What another tool's few-bit format must say of itself, and how its pieces become ours. Exact, or refused by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from deepinfer_lab.errors import CheckpointError, QuantisationError, UnsupportedArchitecture
from deepinfer_lab.quant.layout import PackedWeight, pack

T = TypeVar("T")
INT32 = ("I32",)  # safetensors' dtype names
SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Part:
    """One tensor of a packed layer: its shape, the dtypes that it may have, and whether it must be there."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    required: bool = True


class FewBitFormat(Protocol):
    """How a tool stores its few-bit linear layers.

    Attributes:
        bits, group: of every packed layer.
        channel_groups: name of the part that holds the group of each input channel, integers [K]; None without one.
    """

    @property
    def bits(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def channel_groups(self) -> str | None: ...

    def parts(self, n: int, k: int) -> dict[str, Part]:
        """The tensors of a layer [n, k], by what follows the layer's name."""
        ...

    def weight(self, layer: str, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> PackedWeight:
        """A layer from tensors as `parts` describes them. Columns and scales stay in the order of the file.

        Raises:
            CheckpointError, QuantisationError: values that are damaged, or that a symmetric layout cannot hold.
        """
        ...


def setting(settings: Mapping[str, Any], key: str, allowed: Sequence[T], path: Path, default: T | None = None) -> T:
    """A setting of `quantization_config` in the `config.json` at `path`.

    Raises:
        UnsupportedArchitecture: a value that is not among those allowed.
    """
    value = settings.get(key, default)
    if value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise UnsupportedArchitecture(f"{path}: quantization_config has {key} {value!r}, supported are {names}")
    return allowed[allowed.index(value)]


def words(values: int, bits: int) -> int:
    """How many int32 words hold a row of few-bit values.

    Raises:
        QuantisationError: the values do not fill whole words.
    """
    if values * bits % 32:
        raise QuantisationError(f"{values} values of {bits} bits do not fill whole int32 words")
    return values * bits // 32


def from_offset(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of q + 2**(bits-1), each one little-endian stream of bits, as rows of our layout.

    Our rows are such streams too, of two's complement: the two differ in each value's top bit and in nothing else.

    Args:
        rows: int32 [N, K * bits / 32].

    Returns:
        uint8 [N, K * bits / 8].
    """
    stored = rows.contiguous().view(torch.uint8)
    top_bits = pack(torch.full((1, stored.shape[1] * 8 // bits), -(1 << (bits - 1))), bits)
    return stored ^ top_bits


def check_zero_points(layer: str, zeros: torch.Tensor, bits: int) -> None:
    """Refuse zero points [K / group, N] other than 2**(bits-1): our layouts are symmetric, and nothing is approximated.

    Raises:
        QuantisationError: names the first such zero point.
    """
    symmetric = 1 << (bits - 1)
    wrong = (zeros != symmetric).nonzero()
    if len(wrong):
        group, row = wrong[0].tolist()
        raise QuantisationError(
            f"{layer}: {len(wrong)} of {zeros.numel()} zero points are not {symmetric}, such as {int(zeros[group, row])} "
            f"(row {row}, group {group}); supported are symmetric weights, whose zero points are all {symmetric}"
        )


def float16_scales(layer: str, scales: torch.Tensor) -> torch.Tensor:
    """Scales in float16, where that changes none of them.

    A bfloat16 value of 2**-17 or more is exact in float16, up to 65,280; so files that store bfloat16 mostly are too.

    Raises:
        CheckpointError: a scale is NaN or infinite.
        QuantisationError: a scale is not exact in float16; says how many, and the largest relative error.
    """
    if not scales.isfinite().all():
        raise CheckpointError(f"{layer}: scales hold NaN or infinity")
    half, exact = scales.to(torch.float16), scales.double()
    wrong = half.double() != exact
    if wrong.any():
        error = ((half.double() - exact).abs() / exact.abs())[wrong].max().item()
        raise QuantisationError(
            f"{layer}: {int(wrong.sum())} of {scales.numel()} scales are not exact in float16, which the kernels read; "
            f"the largest relative error is {error:.1e}"
        )
    return half.contiguous()
