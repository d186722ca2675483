"""4-bit weights in the order in which tensor cores take them: `cuda/mma_small.cuh` reads it.

The weight is cut into units of 16 outputs by 64 of k, padded with zeros where N or K ends inside one. A unit is 512 bytes: 16
for each lane of a warp, one load. Lane 4g + t holds outputs g and g + 8, and k from 8t to 8t + 7 of each half of the unit:

       k   0      8      16     24   | 32     40     48     56
    g      lane   lane   lane   lane | lane   lane   lane   lane          one lane's 16 bytes, by k - 8t:
    g + 8  4g     4g+1   4g+2   4g+3 | 4g     4g+1   4g+2   4g+3            0 2 1 3  4 6 5 7 | 32 34 33 35  36 38 37 39

A byte holds two outputs at one k: g in its low nibble, g + 8 in its high one, each as q + 8. A 32-bit word is then what a
lane brings to one mma.m16n8k16, and nibbles that lie 16 bits apart are neighbours in k, a register of the A fragment: nibbles
0 and 4 are a[0], 1 and 5 a[1], 2 and 6 a[2], 3 and 7 a[3].

Units follow one another along K, then along N. Scales lie beside them: for each 16 outputs and each group the 16 scales, of
outputs 0, 8, 1, 9, ..., 7, 15, so that a lane finds both of its own in one 32-bit word.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.kernels.mma_small import UNIT_BYTES, UNIT_K, UNIT_N
from deepinfer_lab.quant.layout import PackedWeight, pack, unpack

OFFSET = 8  # of a stored value: nibbles are unsigned


@dataclass(frozen=True)
class TiledWeight:
    """One 4-bit weight matrix [n, k] in tiles.

    Attributes:
        group: values of k that share a scale. n, k: logical shape.
        tiles: uint8 [ceil(n / 16), ceil(k / 64), 512]. scales: float16 [ceil(n / 16), ceil(k / 64) * 64 / group, 8, 2].
    """

    group: int
    n: int
    k: int
    tiles: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel must read."""
        return self.tiles.nbytes + self.scales.nbytes


def to_tiles(weight: PackedWeight) -> TiledWeight:
    """Re-pack, exactly; on the weight's device.

    Raises:
        QuantisationError: the weight has other than 4 bits.
    """
    if weight.bits != 4:
        raise QuantisationError(f"{weight.bits} bits: tiles exist for 4")
    q = pad(unpack(weight.packed, 4, weight.k), (0, -weight.k % UNIT_K, 0, -weight.n % UNIT_N)) + OFFSET
    # n = 16 tile + 8r + g;  k = 64 unit + 32 half + 8t + 4 word + 2 pair + one
    tile, r, g, unit, half, t, word, pair, one = range(9)
    q = q.view(-1, 2, 8, q.shape[1] // UNIT_K, 2, 4, 2, 2, 2)
    low_first = q.permute(r, tile, unit, g, t, half, word, one, pair).to(torch.uint8)
    tiles = (low_first[0] | low_first[1] << 4).reshape(low_first.shape[1], -1, UNIT_BYTES)
    groups = tiles.shape[1] * UNIT_K // weight.group
    scales = pad(weight.scales, (0, groups - weight.scales.shape[1], 0, -weight.n % UNIT_N))
    scales = scales.view(-1, 2, 8, groups).permute(0, 3, 2, 1).contiguous()
    return TiledWeight(weight.group, weight.n, weight.k, tiles, scales)


def from_tiles(weight: TiledWeight) -> PackedWeight:
    """The inverse of `to_tiles`."""
    count, units, _ = weight.tiles.shape
    q = (
        torch.stack([weight.tiles & 15, weight.tiles >> 4]).view(2, count, units, 8, 4, 2, 2, 2, 2).to(torch.int8)
        - OFFSET
    )
    r, tile, unit, g, t, half, word, one, pair = range(9)
    q = q.permute(tile, r, g, unit, half, t, word, pair, one).reshape(count * UNIT_N, units * UNIT_K)
    scales = weight.scales.permute(0, 3, 2, 1).reshape(count * UNIT_N, -1)
    return PackedWeight(
        bits=4,
        group=weight.group,
        n=weight.n,
        k=weight.k,
        packed=pack(q[: weight.n, : weight.k], 4),
        scales=scales[: weight.n, : weight.k // weight.group].contiguous(),
    )
