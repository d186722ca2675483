"""How prefill and decode share the machine: a policy is a Placement, a Sizer and a Join."""

from dataclasses import dataclass
from typing import Protocol

from deepinfer_lab.errors import SettingError


class Placement(Protocol):
    """Which lanes exist, and which phase runs on which."""

    name: str
    lanes: tuple[str, ...]

    def lane_for(self, phase: str) -> str: ...


class Sizer(Protocol):
    """How many prefill tokens one cycle may carry."""

    name: str

    def tokens(self, chunk_tokens: int, decoding: int) -> int: ...


class Join(Protocol):
    """When the scheduler looks at a result."""

    name: str
    waits: bool  # for each piece of work, before the next one is launched


@dataclass(frozen=True)
class OneLane:
    """Everything on one lane, one piece of work after the other."""

    name: str = "one-lane"
    lanes: tuple[str, ...] = ("main",)

    def lane_for(self, phase: str) -> str:
        return self.lanes[0]


@dataclass(frozen=True)
class Fixed:
    """Always the configured chunk."""

    name: str = "fixed"

    def tokens(self, chunk_tokens: int, decoding: int) -> int:
        return chunk_tokens


@dataclass(frozen=True)
class EachInTurn:
    """Every piece of work is finished and committed before the next one is launched."""

    name: str = "each-in-turn"
    waits: bool = True


@dataclass(frozen=True)
class Policy:
    """A named combination."""

    name: str
    placement: Placement
    sizer: Sizer
    join: Join


POLICIES = {policy.name: policy for policy in (Policy("serial", OneLane(), Fixed(), EachInTurn()),)}


def policy_named(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        SettingError: no such policy.
    """
    if name not in POLICIES:
        raise SettingError(f"policy '{name}': allowed are {', '.join(POLICIES)}")
    return POLICIES[name]
