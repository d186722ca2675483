"""Plans of the wide kernels: what the kernel can do, on any card, for any shape."""

import pytest

from deepinfer_lab.kernels.wide_cuts import UNIT_K, WIDE_CUTS
from deepinfer_lab.kernels.wide_plan import WidePlan, cycles, plan, plans, tiles_of

H200 = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 14}
SMALL = {1: 20, 2: 10}  # multiprocessors and clusters of a part of a card
SHAPES = ((1, 32), (2560, 2048), (2048, 11008), (3584, 18944), (22016, 2048), (37888, 3584))


@pytest.mark.parametrize("held", [H200, SMALL, {1: 1}], ids=["H200", "small", "one"])
@pytest.mark.parametrize("m", [1, 17, 64, 65, 300, 513])
@pytest.mark.parametrize("bits", [4, 3])
def test_every_tile_has_its_blocks(bits, m, held):
    for n, k in SHAPES:
        for cut in (cut for cut in WIDE_CUTS if cut.bits == bits):
            tiles, found = tiles_of(cut, m, n), list(plans(cut, m, n, k, held))
            assert found, "a block for each tile in turn is always one"
            for chosen in found:
                blocks = chosen.clusters * chosen.blocks
                assert chosen.whole(tiles) * blocks + chosen.rest(tiles) == tiles
                assert 0 <= chosen.rest(tiles) <= chosen.clusters
        chosen = plan(bits, m, n, k, held)
        assert chosen.cut.bits == bits
        assert chosen.blocks in held


def test_every_cut_fits_a_multiprocessor():
    assert all(cut.shared <= 227 * 1024 and cut.threads <= 1024 for cut in WIDE_CUTS)
    assert len({cut.name for cut in WIDE_CUTS}) == len(WIDE_CUTS)


def test_plans_fill_the_card():
    """The tiles of real layers, in clusters and whole: four of five multiprocessors are at work, nearly all the time."""
    for n, k in SHAPES[1:]:
        for m in (32, 64, 128, 256):
            chosen = plan(4, m, n, k, H200)
            tiles, units = tiles_of(chosen.cut, m, n), -(-k // UNIT_K)
            longest = chosen.whole(tiles) * units + (chosen.rest(tiles) > 0) * -(-units // chosen.blocks)
            assert tiles * units >= 0.6 * longest * H200[1], (m, n, k, chosen)


def test_more_work_takes_longer():
    chosen = WidePlan(WIDE_CUTS[0], 14, 8)
    assert cycles(chosen, 32, 3584, 2 * 18944, H200) > 1.6 * cycles(chosen, 32, 3584, 18944, H200)
