"""Weights in tiles: every value where the kernel's lanes look for it, and back without loss."""

import pytest
import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.quant.layout import PackedWeight, pack, unpack
from deepinfer_lab.quant.tiles import from_tiles, to_tiles

SHAPES = [(1, 32, 32), (15, 64, 64), (16, 64, 32), (17, 96, 32), (33, 192, 64), (48, 256, 128), (5, 1056, 32)]


def random_weight(n: int, k: int, group: int, bits: int = 4) -> PackedWeight:
    random = torch.Generator().manual_seed(n + k)
    q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), generator=random, dtype=torch.int8)
    return PackedWeight(bits, group, n, k, pack(q, bits), torch.randn(n, k // group, generator=random).half())


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_there_and_back(n, k, group):
    weight = random_weight(n, k, group)
    tiled = to_tiles(weight)
    back = from_tiles(tiled)
    assert (back.bits, back.group, back.n, back.k) == (4, group, n, k)
    assert torch.equal(back.packed, weight.packed)
    assert torch.equal(back.scales, weight.scales)
    assert all(t.is_contiguous() for t in (tiled.tiles, tiled.scales, back.packed, back.scales))
    assert tiled.nbytes == tiled.tiles.nbytes + tiled.scales.nbytes


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_values_lie_as_the_picture_says(n, k, group):
    """One value after the other, by the document's words: lane, byte, nibble."""
    weight = random_weight(n, k, group)
    tiled, q = to_tiles(weight), unpack(weight.packed, 4, k)
    order = [0, 2, 1, 3, 4, 6, 5, 7]  # k of a half's bytes, from 8t on
    for tile in range(tiled.tiles.shape[0]):
        for unit in range(tiled.tiles.shape[1]):
            lanes = tiled.tiles[tile, unit].view(32, 16).tolist()
            for lane, values in enumerate(lanes):
                g, t = divmod(lane, 4)
                for at, byte in enumerate(values):
                    column = 64 * unit + 32 * (at // 8) + 8 * t + order[at % 8]
                    for row, nibble in ((16 * tile + g, byte & 15), (16 * tile + g + 8, byte >> 4)):
                        inside = row < n and column < k
                        assert nibble - 8 == (q[row, column] if inside else 0)
    groups = weight.scales.shape[1]
    for row in range(n):
        assert torch.equal(tiled.scales[row // 16, :groups, row % 8, row % 16 // 8], weight.scales[row])


def test_padding_costs_what_it_must():
    tiled = to_tiles(random_weight(17, 96, 32))
    assert tiled.tiles.shape == (2, 2, 512)
    assert tiled.scales.shape == (2, 4, 8, 2)
    assert (tiled.scales[1, :, :, 1] == 0).all()  # outputs 24 to 31 do not exist


def test_three_bits_are_refused():
    with pytest.raises(QuantisationError, match="3 bits: tiles exist for 4"):
        to_tiles(random_weight(16, 64, 32, bits=3))
