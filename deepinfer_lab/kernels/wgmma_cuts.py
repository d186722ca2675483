"""How the blocks of `cuda/wgmma.cuh` are cut: one compiled kernel each."""

from dataclasses import dataclass

GROUP, COPIERS = 128, 128  # threads of a warpgroup, which multiplies 64 outputs; of the warps that copy
GROUP_OUTPUTS, UNIT_N, UNIT_K, QUARTER = 64, 16, 128, 32  # UNIT: outputs and k of a unit of weights
PATTERN = 1024  # bytes of the swizzle's pattern, to a multiple of which slots are rounded


@dataclass(frozen=True)
class WgmmaCut:
    """The arguments of `GroupCut` in wgmma.cuh, which says what they mean.

    Attributes:
        bits: of a weight. across: warpgroups along outputs. teams: of a block.
        rows: that a block owns. stages: slots of the ring. ahead: halves of units' activations in registers.
    """

    bits: int
    across: int
    teams: int
    rows: int
    stages: int
    ahead: int

    @property
    def name(self) -> str:
        return f"w{self.bits}_wgmma_{self.outputs}_{self.rows}"

    @property
    def outputs(self) -> int:
        """That a block owns."""
        return GROUP_OUTPUTS * self.across

    @property
    def threads(self) -> int:
        return GROUP * self.across * self.teams + COPIERS

    @property
    def unit_k(self) -> int:
        """k of a unit of weights, by which blocks share K."""
        return UNIT_K

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor's registers hold at once."""
        return 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: its ring, the sums of teams but the first, barriers."""
        tiles = self.outputs // UNIT_N
        slot = self.rows * UNIT_K * 2 + tiles * (UNIT_N * UNIT_K * self.bits // 8 + UNIT_K // QUARTER * UNIT_N * 2)
        ring = self.stages * -(-slot // PATTERN) * PATTERN
        return ring + (self.teams - 1) * self.outputs * self.rows * 4 + self.stages * 16 + 16


# Narrow blocks for small weights, of which more fit the card; and wider ones, which fetch activations less often.
WGMMA_CUTS = (
    WgmmaCut(4, across=1, teams=2, rows=64, stages=10, ahead=4),
    WgmmaCut(4, across=2, teams=1, rows=64, stages=9, ahead=4),
    WgmmaCut(4, across=3, teams=1, rows=64, stages=7, ahead=4),
    WgmmaCut(4, across=3, teams=1, rows=128, stages=4, ahead=2),
    WgmmaCut(3, across=1, teams=2, rows=64, stages=10, ahead=4),
    WgmmaCut(3, across=2, teams=1, rows=64, stages=9, ahead=4),
    WgmmaCut(3, across=3, teams=1, rows=64, stages=8, ahead=4),
    WgmmaCut(3, across=2, teams=1, rows=128, stages=5, ahead=2),  # 192 outputs take a register more than there are
)
