"""How the blocks of `cuda/wide.cuh` are cut: one compiled kernel each."""

from dataclasses import dataclass

GROUP = 128  # threads of a warpgroup, which multiplies 64 outputs; one more brings activations
GROUP_OUTPUTS, UNIT_N, UNIT_K, QUARTER = 64, 16, 128, 32  # UNIT: outputs and k of a unit of weights
STAGED = 512  # bytes of a warp's results on their way to the output


@dataclass(frozen=True)
class WideCut:
    """The arguments of `WideCut` in wide.cuh, which says what they mean.

    Attributes:
        bits: of a weight. across: warpgroups along outputs. teams: of a block.
        rows: that a block owns. stages: slots of the ring. depth: of the ring of each warp's weights.
        step: products that are decoded together. arranged: whether activations come so.
    """

    bits: int
    across: int
    teams: int
    rows: int
    stages: int
    depth: int
    step: int
    arranged: bool

    @property
    def name(self) -> str:
        return f"w{self.bits}_wide_{self.outputs}_{self.rows}_{self.teams}{'_arranged' * self.arranged}"

    @property
    def outputs(self) -> int:
        """That a block owns."""
        return GROUP_OUTPUTS * self.across

    @property
    def threads(self) -> int:
        return GROUP * (self.across * self.teams + 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: slots, weights and their scales, results, barriers."""
        warps = self.outputs // UNIT_N * self.teams
        unit = UNIT_N * UNIT_K * self.bits // 8 + UNIT_K // QUARTER * UNIT_N * 2
        ring = self.stages * self.rows * UNIT_K * 2
        return ring + warps * (self.depth * unit + STAGED) + self.stages * 16


# Without any one of these some product of 4 bits takes an H200 2 % longer. Plain rows where there are few of them, arranged
# ones where there are more (wide_plan.py). Narrow blocks of two teams where a weight has few outputs. Steps of four products
# where a multiplier has the registers.
PLAIN = ((4, 1, 32, 12, 6, 4), (2, 2, 32, 12, 6, 4), (3, 1, 64, 7, 6, 4))
ARRANGED = (
    (3, 1, 64, 7, 6, 4),
    (2, 2, 64, 6, 6, 4),
    (3, 1, 128, 4, 5, 4),
    (2, 2, 128, 4, 5, 2),
    (2, 1, 128, 5, 6, 4),
    (3, 1, 192, 3, 5, 2),
    (2, 1, 256, 3, 3, 4),
)
WIDE_CUTS = tuple(
    WideCut(bits, *numbers, arranged)
    for bits in (4, 3)
    for kinds, arranged in ((PLAIN, False), (ARRANGED, True))
    for numbers in kinds
)
