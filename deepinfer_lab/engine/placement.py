"""Which lanes exist, and which phase runs on which."""

from dataclasses import dataclass
from typing import Literal

from deepinfer_lab.errors import SettingError

Phase = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True)
class Placement:
    """Where work runs.

    Attributes:
        prefill, decode: names of the lanes; the same name twice is one lane. Mixed work goes to decode's.
        fused: a chunk and a decode batch that are due in the same cycle become one forward pass.
        priority: decode's kernels are chosen before prefill's where both wait for a multiprocessor.
        decode_share: of the multiprocessors, which prefill does not get; None where they are not divided.
        elastic: a phase keeps to its part only while the other phase has work, too; alone, it has all of them.

    Raises:
        SettingError: fused on two lanes, or multiprocessors divided for one.
    """

    name: str
    prefill: str = "main"
    decode: str = "main"
    fused: bool = False
    priority: bool = False
    decode_share: float | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.fused and self.prefill != self.decode:
            raise SettingError(
                f"placement '{self.name}': fused work runs on one lane, in order; allowed is one name for both"
            )
        if self.decode_share is not None and self.prefill == self.decode:
            raise SettingError(f"placement '{self.name}': decode_share divides between two lanes, and there is one")

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.prefill, self.decode)))

    def lane_for(self, phase: Phase) -> str:
        return self.prefill if phase == "prefill" else self.decode


ONE_LANE = Placement("one-lane")
TWO_LANES = Placement("two-lanes", "prefill", "decode")
PRIORITY_LANES = Placement("priority-lanes", "prefill", "decode", priority=True)
PARTITION = Placement("sm-partition", "prefill", "decode", decode_share=1 / 4)
ELASTIC = Placement("elastic-partition", "prefill", "decode", priority=True, decode_share=1 / 4, elastic=True)
FUSED = Placement("fused", fused=True)
