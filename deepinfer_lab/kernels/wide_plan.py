"""Which of `WIDE_CUTS` a product takes, and in how many clusters of how many blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deepinfer_lab.kernels.wide_cuts import UNIT_K, WIDE_CUTS, WideCut

# In cycles of a multiprocessor of the H200, from clocks read in the kernels, and moved until what they call fastest nearly was,
# of 4,333 plans timed: of a unit (128 of K), what follows.
COLUMN = 1 / 1760  # of a multiply-add on four tensor cores, which no unit keeps busy all the time
CHAIN, COLUMNS, OUTPUT = 1065, 0.37, 0.7  # of a team's unit, from weights to sums; the part of products; of an output
COPIED, PLAIN_CHAIN, PLAIN_OUTPUT = 26, 1400, 0.92  # of a plain row; and likewise where warps copy those
TEAMS = 0.61  # so many teams are faster by this power of their number
FROM_L2, FROM_MEMORY = 1 / 31, 1 / 17  # of a byte, all multiprocessors reading
ARRANGE, ARRANGED = 2900, 1 / 1000  # of the launch that arranges rows; of a byte of them
START, TILE, EXCHANGE = 3500, 800, 2000  # of a launch; of a tile; of a shared tile more
SUM, REMOTE = 0.06, 0.3  # of a team's sum of it; of a sum that is in another block


@dataclass(frozen=True)
class WidePlan:
    """One launch: `clusters` of `blocks` blocks."""

    cut: WideCut
    clusters: int
    blocks: int

    def whole(self, tiles: int) -> int:
        """Of so many tiles, those that a block has to itself."""
        return 0 if self.cut.teams > 1 else tiles // (self.clusters * self.blocks)

    def rest(self, tiles: int) -> int:
        """Tiles that are left over: a cluster has one of them or none."""
        return tiles - self.whole(tiles) * self.clusters * self.blocks


def tiles_of(cut: WideCut, m: int, n: int) -> int:
    """Parts of the output that a block owns at a time."""
    return -(-n // cut.outputs) * -(-m // cut.rows)


def plans(cut: WideCut, m: int, n: int, k: int, held: Mapping[int, int]) -> Iterator[WidePlan]:
    """All that the kernel can do with this cut.

    Args:
        held: clusters that the card holds at once, by the number of their blocks; of one block at least.
    """
    tiles, units = tiles_of(cut, m, n), -(-k // UNIT_K)
    for blocks, most in held.items():
        # A block that has whole tiles stays; others may come after one another.
        for clusters in {min(tiles, most), tiles if cut.teams > 1 and blocks == 1 else most}:
            chosen = WidePlan(cut, clusters, blocks)
            if chosen.rest(tiles) <= clusters and (blocks == 1 or blocks * cut.teams <= units):
                yield chosen


def plan(bits: int, m: int, n: int, k: int, held: Mapping[int, int]) -> WidePlan:
    """The one that a rough model of the card calls fastest: no shape comes unforeseen. held: as `plans`'."""
    found = (chosen for cut in WIDE_CUTS if cut.bits == bits for chosen in plans(cut, m, n, k, held))
    return min(found, key=lambda chosen: cycles(chosen, m, n, k, held))


def cycles(chosen: WidePlan, m: int, n: int, k: int, held: Mapping[int, int]) -> float:
    """What the model says: the slowest of products, what leads to them, L2 and memory, for the block with most to do."""
    cut, tiles, units = chosen.cut, tiles_of(chosen.cut, m, n), -(-k // UNIT_K)
    busy = min(chosen.clusters, held[chosen.blocks]) * chosen.blocks / held[1]  # of the multiprocessors
    products = cut.outputs * cut.rows * UNIT_K * COLUMN
    if cut.arranged:
        chain = (CHAIN + COLUMNS * products + OUTPUT * cut.outputs) / cut.teams**TEAMS
    else:
        chain = max(COPIED * cut.rows, PLAIN_CHAIN / cut.teams**TEAMS) + PLAIN_OUTPUT * cut.outputs
    weights, rows = cut.outputs * (UNIT_K * cut.bits // 8 + 2), min(m, cut.rows) * UNIT_K * 2
    unit = max(
        products,
        chain,
        (weights + rows) * FROM_L2 * max(busy, 0.5),  # twice its share of the L2 at most
        weights * FROM_MEMORY * busy,
    )
    shared = chosen.rest(tiles) > 0
    remote = REMOTE * (chosen.blocks - 1) / chosen.blocks
    alone = chosen.blocks * cut.teams == 1
    exchange = 0 if alone else EXCHANGE + cut.outputs * cut.rows * (cut.teams * SUM + remote)
    turns = -(-chosen.clusters // held[chosen.blocks])
    own = chosen.whole(tiles) * (units * unit + TILE)
    arrange = cut.arranged * (ARRANGE + 2 * m * k * ARRANGED)
    return arrange + turns * (START + own + shared * (-(-units // chosen.blocks) * unit + TILE + exchange))
