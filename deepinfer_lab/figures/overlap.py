"""Prefill and decode on one GPU: which lane ran what and when, and bars for what that is worth."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from deepinfer_lab.figures.style import DECODE, PALETTE, PREFILL, label

PHASES: Mapping[str, str] = MappingProxyType({"prefill": PREFILL, "decode": DECODE, "mixed": PALETTE[2]})
BARS = (PALETTE[5], PALETTE[3], PALETTE[4])  # none of which is a phase's
HIGH = 0.8  # of a group of bars, and of a lane; 1 would touch its neighbour


def draw_lanes(axes: Axes, steps: pd.DataFrame, first_token_ms: float, title: str) -> None:
    """A lane's steps, one row a lane. Time 0 is the document's send; the lines are there and at its first token.

    Args:
        steps: columns lane, phase, started_ms, finished_ms; lanes in the order of their names.
    """
    lanes = sorted(steps["lane"].unique())
    for step in steps.itertuples():
        axes.barh(
            lanes.index(step.lane), step.finished_ms - step.started_ms, left=step.started_ms, height=HIGH,
            color=PHASES[step.phase], edgecolor="white", linewidth=0.4,
        )  # fmt: skip
    for at in (0, first_token_ms):
        axes.axvline(at, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.grid(visible=False)
    label(axes, title, "", "")


def phase_legend(phases: Sequence[str]) -> list[Patch]:
    """What the colours of `draw_lanes` mean, for the phases that it drew."""
    return [Patch(color=colour, label=phase) for phase, colour in PHASES.items() if phase in phases]


def draw_bars(
    axes: Axes,
    table: pd.DataFrame,
    group: str,
    value: str,
    title: str,
    unit: str,
    *,
    series: str | None = None,
    form: str = "{:.0f}",
) -> None:
    """Horizontal bars from zero, each with its number: a group of bars for each value of `group`, from top to bottom.

    Args:
        table: columns `group`, `value` and `series`, both in the order of their first rows. A bar without value is left out.
        series: the column that tells up to three bars of a group apart; None where a group has one.
        form: how a value is written beside its bar.
    """
    groups = table[group].unique()
    names = [value] if series is None else list(table[series].unique())
    high = HIGH / len(names)
    clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a number is not crossed by a line
    for number, name in enumerate(names):
        its = table if series is None else table[table[series] == name]
        found = its.set_index(group)[value].astype(float).reindex(groups)
        y = np.arange(len(groups)) + (number - (len(names) - 1) / 2) * high
        axes.barh(y, found, height=high * 0.9, color=BARS[number], label=str(name))
        for at, length in zip(y, found, strict=True):
            if np.isfinite(length):
                axes.annotate(
                    form.format(length), (length, at), xytext=(4, 0), textcoords="offset points", va="center",
                    fontsize=9, bbox=clear,
                )  # fmt: skip
    axes.set_xlim(0, (table[value].astype(float).max() or 1.0) * 1.22)
    axes.set_yticks(range(len(groups)), groups)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    label(axes, title, unit, "")
