"""Few-bit weights in the order in which tensor cores take them: `cuda/mma_unit.cuh` reads it.

The weight is cut into units of 16 outputs by 128 of k, padded with zeros where N or K ends inside one. Units follow one another
along K, then along N. Of a unit, lane 4g + t of a warp holds outputs g and g + 8, and k from 8t to 8t + 7 of each quarter:

       k   0      8      16     24   | 32     40     48     56   | 64 ...     | 96 ...
    g      lane   lane   lane   lane | lane   lane   lane   lane |            |
    g + 8  4g     4g+1   4g+2   4g+3 | 4g     4g+1   4g+2   4g+3 | again      | again

Two quarters of a lane are four products of mma.m16n8k16, and each product takes four registers of two values, neighbours in k.
Product 2h + w is about k = 32h + 8t + 4w and the three that follow; its registers, pairs 4 (2h + w) + i of the sixteen:

    i = 0: output g, k and k + 1            2: output g, k + 2 and k + 3
        1: output g + 8, k and k + 1        3: output g + 8, k + 2 and k + 3

A value is stored as q + 2^(bits-1), the first of a pair in the low half of a 32-bit word and the second at the same place in
the high half. Words of two quarters, bits of either half from high to low:

    W4, word w of 4    pair 4w+3 (4 bits) | 4w+2 | 4w+1 | 4w
    W3, word w of 3    bit w of pair 15 (1 bit) | 5w+4 (3 bits) | 5w+3 | 5w+2 | 5w+1 | 5w

A lane has 8 (W4) or 6 (W3) such words of a unit. The first four of all lanes come first, 16 bytes a lane, then the rest:

    | lane 0: words 0-3 | lane 1: words 0-3 | ... | lane 31: words 0-3 | lane 0: words 4-7 (W3: 4-5) | ... | lane 31 |

so that two loads of a warp, of 16 and 16 (W3: 8) bytes a lane, read whole lines. Scales lie beside the units: for each 16
outputs and each group the 16 scales, of outputs 0, 8, 1, 9, ..., 7, 15, so that a lane finds both of its own in one word.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, unit_bytes
from deepinfer_lab.quant.layout import PackedWeight, pack, unpack

LANES, FIRST_WORDS = 32, 4
SLICE = 1 << 24  # values that are re-packed at a time: a whole layer's would take a gigabyte
BOTH = 0x00010001  # one bit in either half of a word


@dataclass(frozen=True)
class TiledWeight:
    """One weight matrix [n, k] in tiles.

    Attributes:
        bits: 3 or 4. group: values of k that share a scale. n, k: logical shape.
        tiles: uint8 [ceil(n / 16), ceil(k / 128), 256 * bits].
        scales: float16 [ceil(n / 16), ceil(k / 128) * 128 / group, 8, 2].
    """

    bits: int
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
    """Re-pack, exactly; on the weight's device. Beside the result it takes up to 16 bytes for each of SLICE values."""
    bits, count, units = weight.bits, -(-weight.n // UNIT_N), -(-weight.k // UNIT_K)
    tiles = weight.packed.new_empty(count, units, unit_bytes(bits))
    step = max(1, SLICE // (UNIT_N * weight.k))
    for first in range(0, count, step):
        rows = weight.packed[first * UNIT_N : (first + step) * UNIT_N]
        tiles[first : first + step] = _tiles(unpack(rows, bits, weight.k), bits)
    groups = units * UNIT_K // weight.group
    scales = pad(weight.scales, (0, groups - weight.scales.shape[1], 0, -weight.n % UNIT_N))
    scales = scales.view(-1, 2, 8, groups).permute(0, 3, 2, 1).contiguous()
    return TiledWeight(bits, weight.group, weight.n, weight.k, tiles, scales)


def _tiles(q: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [N, K] -> uint8 as `TiledWeight.tiles`."""
    q = pad(q, (0, -q.shape[1] % UNIT_K, 0, -q.shape[0] % UNIT_N)) + (1 << bits - 1)
    # n = 16 tile + 8r + g;  k = 128 unit + 64 two + 32 half + 8t + 4 word + 2 pair + one
    tile, r, g, unit, two, half, t, word, pair, one = range(10)
    q = q.view(-1, 2, 8, q.shape[1] // UNIT_K, 2, 2, 4, 2, 2, 2)
    q = q.permute(one, tile, unit, g, t, two, half, word, pair, r).to(torch.int32)
    words = _words((q[0] | q[1] << 16).reshape(*q.shape[1:3], LANES, 2, 16), bits).flatten(3)
    parts = [words[..., :FIRST_WORDS].flatten(2), words[..., FIRST_WORDS:].flatten(2)]
    return torch.cat(parts, dim=2).view(torch.uint8)


def from_tiles(weight: TiledWeight) -> PackedWeight:
    """The inverse of `to_tiles`."""
    bits, (count, units, _) = weight.bits, weight.tiles.shape
    assert weight.tiles.shape[2] == unit_bytes(bits)
    parts = weight.tiles.view(torch.int32).split([LANES * FIRST_WORDS, LANES * (2 * bits - FIRST_WORDS)], dim=2)
    words = torch.cat([part.reshape(count, units, LANES, -1) for part in parts], dim=3)
    pairs = _pairs(words.view(count, units, LANES, 2, bits), bits)
    q = torch.stack([pairs & 0xFFFF, pairs >> 16]).to(torch.int8) - (1 << bits - 1)
    one, tile, unit, g, t, two, half, word, pair, r = range(10)
    q = q.view(2, count, units, 8, 4, 2, 2, 2, 2, 2).permute(tile, r, g, unit, two, half, t, word, pair, one)
    q = q.reshape(count * UNIT_N, units * UNIT_K)
    scales = weight.scales.permute(0, 3, 2, 1).reshape(count * UNIT_N, -1)
    return PackedWeight(
        bits=bits,
        group=weight.group,
        n=weight.n,
        k=weight.k,
        packed=pack(q[: weight.n, : weight.k], bits),
        scales=scales[: weight.n, : weight.k // weight.group].contiguous(),
    )


def _words(pairs: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., 16], a value in either half -> int32 [..., bits]."""
    fields = 16 // bits  # in half a word
    whole = pairs[..., : fields * bits].unflatten(-1, (bits, fields))
    words = whole[..., 0].clone()
    for i in range(1, fields):
        words |= whole[..., i] << bits * i
    if bits == 3:  # the last pair, a bit to each word
        words |= (pairs[..., 15:] >> torch.arange(3, dtype=torch.int32, device=pairs.device) & BOTH) << 15
    return words


def _pairs(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_words`."""
    field = BOTH * ((1 << bits) - 1)
    pairs = torch.stack([words >> bits * i & field for i in range(16 // bits)], dim=-1).flatten(-2)
    if bits == 4:
        return pairs
    last = (words >> 15 & BOTH) << torch.arange(3, dtype=torch.int32, device=words.device)
    return torch.cat([pairs, last.sum(-1, keepdim=True, dtype=torch.int32)], dim=-1)
