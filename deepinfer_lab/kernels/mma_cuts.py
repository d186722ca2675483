"""How the blocks of `cuda/mma_block.cuh` are cut: one compiled kernel each."""

from dataclasses import dataclass

UNIT_N, UNIT_K = 16, {4: 64, 3: 128}  # outputs and, for its bits, k of a unit of weights
WARP, QUARTER = 32, 32  # threads; k of a quarter of a unit


@dataclass(frozen=True)
class Cut:
    """The arguments of `Cut` in mma_block.cuh, which says what they mean.

    Attributes:
        bits: of a weight. outputs, rows: that a block owns.
        across, down: warps of a team along outputs and along rows. teams: of a block. stages: slots of each team's ring.
        resident: blocks that a multiprocessor's registers hold at once.
    """

    bits: int
    outputs: int
    rows: int
    across: int
    down: int
    teams: int
    stages: int
    resident: int

    @property
    def name(self) -> str:
        return f"w{self.bits}_mma_block_{self.outputs}_{self.rows}"

    @property
    def threads(self) -> int:
        return WARP * self.across * self.down * self.teams

    @property
    def unit_k(self) -> int:
        """k of a unit of weights, by which blocks share K."""
        return UNIT_K[self.bits]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: its rings, or its sums where they take more."""
        k = self.unit_k
        slot = self.rows * k * 2 + self.outputs * (k * self.bits // 8 + k // QUARTER * 2)
        stride = self.outputs + (36 - self.outputs % 32) % 32
        return self.teams * max(self.stages * slot, self.rows * stride * 4)


# For each number of rows a narrow block, of which many fit the card whatever the weight's shape, and a wide one, which fetches
# activations a third as often and needs a large weight. Narrow ones fit the 99 KiB that a block may have on consumer cards.
CUTS = (
    Cut(4, 64, 16, across=1, down=1, teams=4, stages=4, resident=3),
    Cut(4, 192, 16, across=4, down=1, teams=3, stages=4, resident=1),
    Cut(4, 64, 32, across=1, down=1, teams=4, stages=3, resident=2),
    Cut(4, 192, 32, across=4, down=1, teams=3, stages=4, resident=1),
    Cut(4, 64, 64, across=2, down=1, teams=2, stages=4, resident=2),
    Cut(4, 192, 64, across=4, down=1, teams=2, stages=5, resident=1),
    Cut(4, 64, 128, across=2, down=2, teams=1, stages=4, resident=2),
    Cut(4, 192, 128, across=4, down=2, teams=1, stages=6, resident=1),
    Cut(3, 64, 16, across=1, down=1, teams=4, stages=3, resident=2),
    Cut(3, 192, 16, across=4, down=1, teams=3, stages=3, resident=1),
    Cut(3, 64, 32, across=2, down=1, teams=2, stages=4, resident=2),
    Cut(3, 192, 32, across=4, down=1, teams=3, stages=3, resident=1),
    Cut(3, 64, 64, across=2, down=1, teams=2, stages=2, resident=2),
    Cut(3, 192, 64, across=4, down=1, teams=2, stages=3, resident=1),
    Cut(3, 64, 128, across=2, down=2, teams=1, stages=2, resident=2),
    Cut(3, 192, 128, across=4, down=2, teams=1, stages=3, resident=1),
)
