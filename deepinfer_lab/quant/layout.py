"""Bit layouts of few-bit weights, bit for bit those of the DeepInfer-SM86 article, part 7 (sections 2.3 and 2.4).

W4: uint8 [N, K/2]. A byte holds two signed 4-bit values, the even k in its low nibble.
W3: uint8 [N, 3K/8]. Three bytes hold eight signed 3-bit values, value i in bits 3i .. 3i+2 of the 24-bit
    little-endian word, so that values 2 and 5 straddle two bytes.
Both are symmetric: weight[n, k] = q[n, k] * scales[n, k // group].
"""

from dataclasses import dataclass

import torch

from deepinfer_lab.errors import QuantisationError

BITS = (3, 4)
GROUPS = (32, 64, 128)


def check_shape(k: int, bits: int, group: int) -> None:
    """Refuse what no layout can hold.

    Raises:
        QuantisationError: bits not 3 or 4, group not 32, 64 or 128, or K not a positive multiple of the group.
    """
    if bits not in BITS:
        raise QuantisationError(f"{bits} bits: packed layouts exist for {BITS[0]} and {BITS[1]} bits")
    if group not in GROUPS:
        raise QuantisationError(f"group {group}: allowed are {', '.join(map(str, GROUPS))}")
    if k <= 0 or k % group:
        fits = [g for g in GROUPS if k > 0 and k % g == 0]
        hint = f"groups that divide it: {', '.join(map(str, fits))}" if fits else "none of 32, 64, 128 divides it"
        raise QuantisationError(f"K = {k} is not a multiple of group {group}; {hint}")


def packed_columns(k: int, bits: int) -> int:
    """Bytes in one packed row of K values."""
    return k * bits // 8


def pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack signed integers.

    Args:
        q: integer tensor [N, K] with values in [-2**(bits-1), 2**(bits-1) - 1]; K even (4 bits) or a multiple of 8 (3 bits).
        bits: 3 or 4.

    Returns:
        uint8 [N, K * bits / 8].
    """
    n, k = q.shape
    q = q.contiguous()  # what is computed from it keeps its strides, and kernels take nothing but row-major
    field = q.to(torch.int32) & ((1 << bits) - 1)
    if bits == 4:
        return (field[:, 0::2] | (field[:, 1::2] << 4)).to(torch.uint8)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=q.device)
    word = (field.view(n, k // 8, 8) << shifts).sum(dim=2, dtype=torch.int32)  # disjoint bits: a sum is an or
    three_bytes = torch.stack([word & 0xFF, (word >> 8) & 0xFF, word >> 16], dim=2)
    return three_bytes.to(torch.uint8).view(n, k * 3 // 8)


def unpack(packed: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 [N, K * bits / 8] -> int8 [N, K]."""
    n, packed = packed.shape[0], packed.contiguous()
    if bits == 4:
        field = torch.stack([packed & 0xF, packed >> 4], dim=2).to(torch.int8)
    else:
        b = packed.view(n, k // 8, 3).to(torch.int32)
        word = b[..., 0] | (b[..., 1] << 8) | (b[..., 2] << 16)
        shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=packed.device)
        field = ((word.unsqueeze(2) >> shifts) & 7).to(torch.int8)
    sign = 1 << (bits - 1)
    return ((field ^ sign) - sign).view(n, k)  # two's complement sign extension


@dataclass(frozen=True)
class PackedWeight:
    """One quantised weight matrix.

    Attributes:
        bits: 3 or 4. group: values of k that share a scale. n, k: logical shape.
        packed: uint8 [n, k * bits / 8]. scales: float16 [n, k / group].
    """

    bits: int
    group: int
    n: int
    k: int
    packed: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        check_shape(self.k, self.bits, self.group)
        for name, tensor, columns in (
            ("packed", self.packed, packed_columns(self.k, self.bits)),
            ("scales", self.scales, self.k // self.group),
        ):
            if tuple(tensor.shape) != (self.n, columns):
                raise QuantisationError(f"{name} has shape {tuple(tensor.shape)}, expected {(self.n, columns)}")
        if self.packed.dtype != torch.uint8 or not self.scales.dtype.is_floating_point:
            raise QuantisationError(
                f"packed is {self.packed.dtype} and scales are {self.scales.dtype}, expected torch.uint8 and floats"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel must read: packed values and scales."""
        return self.packed.nbytes + self.scales.nbytes

    def dequantise(self, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Dense [rows, k] in `dtype`; the product is formed in float32 and rounded once."""
        scales = self.scales[rows].float()
        q = unpack(self.packed[rows], self.bits, self.k).view(*scales.shape, self.group)
        return (q.float() * scales.unsqueeze(2)).view(-1, self.k).to(dtype)

    def to(self, device: torch.device | str) -> "PackedWeight":
        return PackedWeight(self.bits, self.group, self.n, self.k, self.packed.to(device), self.scales.to(device))


def concatenate(weights: list[PackedWeight]) -> PackedWeight:
    """Stack weights that read the same input (Q, K and V, say) along N. All must share bits, group and k."""
    first = weights[0]
    if any((w.bits, w.group, w.k) != (first.bits, first.group, first.k) for w in weights):
        raise QuantisationError("weights to be fused must share bits, group and K")
    return PackedWeight(
        first.bits,
        first.group,
        sum(w.n for w in weights),
        first.k,
        torch.cat([w.packed for w in weights]),
        torch.cat([w.scales for w in weights]),
    )
