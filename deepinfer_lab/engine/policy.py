"""How prefill and decode share the machine: a policy is a Placement, a Sizer and a Join."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deepinfer_lab.engine.placement import ELASTIC, FUSED, ONE_LANE, PARTITION, PRIORITY_LANES, TWO_LANES, Placement
from deepinfer_lab.engine.sizer import Adaptive, DecodeAware, Fixed, MillisecondBudget, Sizer
from deepinfer_lab.errors import SettingError

DEFAULT_ITL_TARGET_MS = 20.0


@dataclass(frozen=True)
class Join:
    """When the scheduler looks at a result.

    Attributes:
        each: before it launches anything else.
        cycle: before it begins the next cycle, for all that this one launched: the article's barrier.
        Neither: when the result is there, and meanwhile further work is launched, decode steps even before the tokens of the
        last one are known.
    """

    name: str
    each: bool = False
    cycle: bool = False

    @property
    def runs_ahead(self) -> bool:
        return not (self.each or self.cycle)


EACH_IN_TURN = Join("each-in-turn", each=True)
BARRIER = Join("barrier", cycle=True)
ASYMMETRIC = Join("asymmetric")


@dataclass(frozen=True)
class Policy:
    """A named combination. Its sizer learns from one engine: a policy serves one engine alone."""

    name: str
    placement: Placement
    sizer: Sizer
    join: Join

    def on_one_lane(self) -> "Policy":
        """The same without a second lane: what remains of it on a CPU, where nothing overlaps."""
        return replace(self, placement=ONE_LANE)


@dataclass(frozen=True)
class Preset:
    """How a policy is made.

    Attributes:
        sizer: from the target between two tokens, in milliseconds. summary: what it does, in a few words.
    """

    placement: Placement
    sizer: Callable[[float], Sizer]
    join: Join
    summary: str


def _fixed(_: float) -> Sizer:
    return Fixed()


PRESETS: Mapping[str, Preset] = {
    "serial": Preset(ONE_LANE, _fixed, EACH_IN_TURN, "one after the other, each awaited: no overlap"),
    "dual-stream": Preset(TWO_LANES, _fixed, BARRIER, "the article's: two streams, joined in every cycle"),
    "dual-stream-async": Preset(TWO_LANES, _fixed, ASYMMETRIC, "two streams, decode never waits for prefill"),
    "priority": Preset(PRIORITY_LANES, _fixed, ASYMMETRIC, "the same, and decode's stream has priority"),
    "dynamic-chunk": Preset(
        PRIORITY_LANES, lambda _: DecodeAware(512), ASYMMETRIC, "the same, with small chunks beside decode"
    ),
    "time-sliced": Preset(
        ONE_LANE, MillisecondBudget, ASYMMETRIC, "one stream, each chunk as long as the target leaves time"
    ),
    "mixed": Preset(FUSED, _fixed, ASYMMETRIC, "chunk and decode batch in one forward pass"),
    "partition": Preset(PARTITION, _fixed, ASYMMETRIC, "two streams, each with multiprocessors of its own"),
    "adaptive": Preset(
        ELASTIC, Adaptive, ASYMMETRIC, "the same while both run; all to one alone, or where the target asks for it"
    ),
}
POLICIES = tuple(PRESETS)


def policy_named(name: str, itl_target_ms: float = DEFAULT_ITL_TARGET_MS) -> Policy:
    """A new policy of the preset called `name`.

    Args:
        itl_target_ms: what `time-sliced` and `adaptive` aim at between two tokens of a request, in milliseconds.

    Raises:
        SettingError: no such preset, or a target of 0 or less.
    """
    if name not in PRESETS:
        raise SettingError(f"policy '{name}': allowed are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    return Policy(name, preset.placement, preset.sizer(itl_target_ms), preset.join)
