"""Weights in tiles: every value where the kernel's lanes look for it, and back without loss."""

import pytest
import torch

from deepinfer_lab.quant import tiles
from deepinfer_lab.quant.layout import PackedWeight, pack, unpack
from deepinfer_lab.quant.tiles import from_tiles, to_tiles

SHAPES = [(1, 32, 32), (15, 64, 64), (16, 64, 32), (17, 96, 32), (33, 192, 64), (48, 256, 128), (5, 1056, 32)]
bits_and_shapes = pytest.mark.parametrize(("bits", "n", "k", "group"), [(b, *s) for b in (4, 3) for s in SHAPES])


def random_weight(bits: int, n: int, k: int, group: int) -> PackedWeight:
    random = torch.Generator().manual_seed(n + k)
    q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), generator=random, dtype=torch.int8)
    return PackedWeight(bits, group, n, k, pack(q, bits), torch.randn(n, k // group, generator=random).half())


@bits_and_shapes
def test_there_and_back(bits, n, k, group):
    weight = random_weight(bits, n, k, group)
    tiled = to_tiles(weight)
    back = from_tiles(tiled)
    assert (back.bits, back.group, back.n, back.k) == (bits, group, n, k)
    assert torch.equal(back.packed, weight.packed)
    assert torch.equal(back.scales, weight.scales)
    assert all(t.is_contiguous() for t in (tiled.tiles, tiled.scales, back.packed, back.scales))
    assert tiled.nbytes == tiled.tiles.nbytes + tiled.scales.nbytes


@bits_and_shapes
def test_slices_are_the_whole(monkeypatch, bits, n, k, group):
    weight = random_weight(bits, n, k, group)
    whole = to_tiles(weight)
    for tiles_at_a_time in (1, 2):
        monkeypatch.setattr(tiles, "SLICE", tiles_at_a_time * 16 * k)
        assert torch.equal(to_tiles(weight).tiles, whole.tiles)


def lane_words(unit: list[int], lane: int, bits: int) -> list[int]:
    """The lane's words of a unit, by the document's words: 16 bytes, and the rest where those of all lanes end."""
    rest = 4 * (2 * bits - 4)
    mine = unit[16 * lane : 16 * lane + 16] + unit[512 + rest * lane : 512 + rest * (lane + 1)]
    return [int.from_bytes(bytes(mine[at : at + 4]), "little") for at in range(0, len(mine), 4)]


def pair_of(words: list[int], p: int, bits: int) -> tuple[int, int]:
    """Pair p of the sixteen in the words of two quarters: the value of the low half, and of the high half."""
    if bits == 4:
        return tuple(words[p // 4] >> 4 * (p % 4) + high & 15 for high in (0, 16))
    if p < 15:
        return tuple(words[p // 5] >> 3 * (p % 5) + high & 7 for high in (0, 16))
    return tuple(sum((words[w] >> 15 + high & 1) << w for w in range(3)) for high in (0, 16))


@bits_and_shapes
def test_values_lie_as_the_picture_says(bits, n, k, group):
    """One value after the other: unit, lane, word, field."""
    weight = random_weight(bits, n, k, group)
    tiled, q = to_tiles(weight), unpack(weight.packed, bits, k)
    for tile in range(tiled.tiles.shape[0]):
        for unit in range(tiled.tiles.shape[1]):
            data = tiled.tiles[tile, unit].tolist()
            for lane in range(32):
                words, (g, t) = lane_words(data, lane, bits), divmod(lane, 4)
                for p in range(32):
                    two, product, i = p // 16, p % 16 // 4, p % 4
                    column = 128 * unit + 64 * two + 32 * (product // 2) + 8 * t + 4 * (product % 2) + i // 2 * 2
                    row = 16 * tile + g + i % 2 * 8
                    for one, value in enumerate(pair_of(words[two * bits : (two + 1) * bits], p % 16, bits)):
                        inside = row < n and column + one < k
                        assert value - 2 ** (bits - 1) == (q[row, column + one] if inside else 0)
    groups = weight.scales.shape[1]
    for row in range(n):
        assert torch.equal(tiled.scales[row // 16, :groups, row % 8, row % 16 // 8], weight.scales[row])


@pytest.mark.parametrize("bits", [4, 3])
def test_padding_costs_what_it_must(bits):
    tiled = to_tiles(random_weight(bits, 17, 160, 32))
    assert tiled.tiles.shape == (2, 2, 256 * bits)
    assert tiled.scales.shape == (2, 8, 8, 2)
    assert (tiled.scales[1, :, :, 1] == 0).all()  # outputs 24 to 31 do not exist
    assert (tiled.scales[:, 5:] == 0).all()
