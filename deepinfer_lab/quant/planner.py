"""3 or 4 bits for each part of a model, so that it fits a size and loses as little as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from deepinfer_lab.errors import SettingError
from deepinfer_lab.quant.plan import LayerPlan


@dataclass(frozen=True)
class Unit:
    """Layers that must have the same bits, such as q, k and v.

    Attributes:
        layers: canonical names, such as `model.layers.0.mlp.down_proj`.
        bytes3, bytes4: packed values and scales of all of them, in W3 and in W4.
        loss: what it costs to have only this unit in W3, in any measure that adds up.

    Raises:
        SettingError: W4 smaller than W3, or a loss that is not finite.
    """

    layers: tuple[str, ...]
    bytes3: int
    bytes4: int
    loss: float

    def __post_init__(self) -> None:
        if not 0 <= self.bytes3 <= self.bytes4 or not isfinite(self.loss):
            raise SettingError(
                f"unit {', '.join(self.layers)}: {self.bytes3} bytes in W3, {self.bytes4} in W4, loss {self.loss}; "
                "W4 must take no fewer bytes than W3, and the loss must be finite"
            )


class _Choice(NamedTuple):
    """Some units in W4: the bytes that this adds to all-W3, the loss of the others, and which they are."""

    extra: int
    loss: float
    in_w4: int  # bit i for unit i


def plan_for(budget_bytes: int, units: Sequence[Unit]) -> LayerPlan:
    """The plan of least summed loss that fits a budget: exactly that, not an approximation.

    A 0/1 knapsack: W4 for a unit costs bytes and avoids its loss. Unit after unit, only those choices are kept that no other
    beats in both (Nemhauser and Ullmann, 1969). There are at most as many as different sums of bytes. A model's blocks are
    alike and their sizes are multiples of thousands, so that SmolLM2-135M's 120 units leave fewer than a thousand choices.
    Of equal losses the smaller plan is taken.

    That losses add up is an assumption about the model, and the measurement of a plan is what tells.

    Args:
        budget_bytes: for all units together.
        units: with no layer in common.

    Raises:
        SettingError: a budget below all units in W3, or a layer in two units.
    """
    layers = [layer for unit in units for layer in unit.layers]
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        raise SettingError(f"layer {twice[0]} is in two units; allowed is one")
    least = sum(unit.bytes3 for unit in units)
    if budget_bytes < least:
        raise SettingError(f"budget of {budget_bytes} bytes: all layers in W3 take {least} already")
    choices = [_Choice(0, sum(unit.loss for unit in units), 0)]
    for number, unit in enumerate(units):
        room = budget_bytes - least - (unit.bytes4 - unit.bytes3)
        widened = [
            _Choice(c.extra + unit.bytes4 - unit.bytes3, c.loss - unit.loss, c.in_w4 | 1 << number)
            for c in choices
            if c.extra <= room
        ]
        choices = _best(choices + widened)
    chosen = choices[-1].in_w4
    bits = {layer: 4 if chosen >> i & 1 else 3 for i, unit in enumerate(units) for layer in unit.layers}
    return LayerPlan(f"planned-{budget_bytes}-bytes", bits)


def _best(choices: list[_Choice]) -> list[_Choice]:
    """Those that lose less than all that are as small, smallest first: so the last loses least."""
    best: list[_Choice] = []
    for choice in sorted(choices):
        if not best or choice.loss < best[-1].loss:
            best.append(choice)
    return best
