"""How the blocks of `cuda/wide.cuh` are cut: one compiled kernel each."""

from dataclasses import dataclass

GROUP = 128  # threads of a warpgroup, which multiplies 64 outputs; one more orders the copies
GROUP_OUTPUTS, UNIT_N, UNIT_K, QUARTER = 64, 16, 128, 32  # UNIT: outputs and k of a unit of weights
PATTERN = 1024  # bytes of the swizzle's pattern, to a multiple of which slots are rounded
STAGED = 512  # bytes of a warp's results on their way to the output


@dataclass(frozen=True)
class WideCut:
    """The arguments of `WideCut` in wide.cuh, which says what they mean.

    Attributes:
        bits: of a weight. across: warpgroups along outputs. teams: of a block.
        rows: that a block owns. stages: slots of the ring. cluster: blocks that share rows.
        step: products that are decoded together.
    """

    bits: int
    across: int
    teams: int
    rows: int
    stages: int
    cluster: int
    step: int

    @property
    def name(self) -> str:
        return f"w{self.bits}_wide_{self.outputs}_{self.rows}_{self.cluster}"

    @property
    def outputs(self) -> int:
        """That a block owns."""
        return GROUP_OUTPUTS * self.across

    @property
    def threads(self) -> int:
        return GROUP * (self.across * self.teams + 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: its ring, the sums of teams but the first, results, barriers."""
        tiles = self.outputs // UNIT_N
        slot = self.rows * UNIT_K * 2 + tiles * (UNIT_N * UNIT_K * self.bits // 8 + UNIT_K // QUARTER * UNIT_N * 2)
        ring = self.stages * -(-slot // PATTERN) * PATTERN
        sums, staged = (self.teams - 1) * self.outputs * self.rows * 4, tiles * STAGED
        return ring + sums + staged + self.stages * 16 + 16
