"""Blocks that change hands, what became of replies, and how late the scheduler learns that work is done."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from deepinfer_lab.figures.style import PALETTE, label, log_axis

STATE_COLOURS = {"free": "#F2F2F2", "writing": PALETTE[4], "readonly": PALETTE[5], "pending": "#AAAAAA"}
GHOST = PALETTE[1]


def block_table(race: pd.DataFrame) -> pd.DataFrame:
    """What `draw_blocks` shows, one row for each block at each moment.

    Args:
        race: columns moment, states and owners (lists, one a block), written (the block that A's step has just written to, or
            None), in order.

    Returns:
        Columns step, moment, block, state, owner, written (bool).
    """
    return pd.DataFrame(
        [
            {"step": step, "moment": row.moment, "block": block, "state": state, "owner": owner,
             "written": row.written == block}
            for step, row in enumerate(race.itertuples())
            for block, (state, owner) in enumerate(zip(row.states, row.owners, strict=True))
        ]
    )  # fmt: skip


def draw_blocks(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """A column for each moment and a row for each block: its colour is its state, its letter the owner.

    A frame is drawn where A's step writes: heavy where the block is another's by then.

    Args:
        table: as `block_table` returns it.
    """
    for row in table.itertuples():
        axes.add_patch(
            Rectangle((row.step + 0.02, row.block + 0.04), 0.96, 0.92, facecolor=STATE_COLOURS[row.state], linewidth=0)
        )
        axes.text(row.step + 0.5, row.block + 0.5, row.owner, ha="center", va="center", fontsize=12)
        if row.written:
            harm = row.owner not in ("", "A")
            axes.add_patch(
                Rectangle(
                    (row.step + 0.04, row.block + 0.07), 0.92, 0.86, fill=False,
                    edgecolor=GHOST if harm else "black", linewidth=4 if harm else 1.5,
                )
            )  # fmt: skip
    moments = table.drop_duplicates("step")
    axes.set(xlim=(0, len(moments)), ylim=(table["block"].max() + 1, 0))
    axes.set_xticks(np.arange(len(moments)) + 0.5, moments["moment"], fontsize=9)
    axes.set_yticks(np.arange(table["block"].max() + 1) + 0.5, range(table["block"].max() + 1))
    axes.grid(visible=False)
    label(axes, title, "", "block")


def block_legend(axes: Axes) -> None:
    """Below the axes: what the colours and frames of `draw_blocks` mean."""
    handles = [Patch(color=colour, label=state) for state, colour in STATE_COLOURS.items()]
    handles += [
        Patch(fill=False, edgecolor="black", linewidth=1.5, label="A's step writes"),
        Patch(fill=False, edgecolor=GHOST, linewidth=3, label="into a block of B's"),
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=len(handles), fontsize=9.5)


def draw_outcomes(axes: Axes, table: pd.DataFrame) -> None:
    """Blocks handed out early and replies that came out wrong, in groups of bars by lateness, with the number on each bar.

    Args:
        table: columns late_percent, early, wrong.
    """
    places = np.arange(len(table))
    for shift, column, colour, name in (
        (-0.2, "early", STATE_COLOURS["pending"], "blocks handed out before their fences had passed"),
        (0.2, "wrong", GHOST, "replies that came out wrong"),
    ):
        bars = axes.bar(places + shift, table[column], 0.38, color=colour, label=name)
        axes.bar_label(bars, fontsize=11)
    axes.set_xticks(places, [f"{late}%" for late in table["late_percent"]])
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left")
    label(axes, "Without PENDING", "turns in which a lane runs nothing", "count")


def draw_pool(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """Blocks in each state, turn by turn, one on the other.

    Args:
        table: columns turn and one for each state.
    """
    states = ("writing", "readonly", "pending", "free")
    axes.stackplot(
        table["turn"], [table[state] for state in states], colors=[STATE_COLOURS[state] for state in states],
        labels=states, step="post", linewidth=0,
    )  # fmt: skip
    axes.set(xlim=(0, table["turn"].max()), ylim=(0, table[list(states)].sum(axis=1).max()))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    label(axes, title, "turn", "blocks")


def draw_lateness(axes: Axes, table: pd.DataFrame, step_ms: float) -> None:
    """Median and 5th to 95th percentile of how late each way is, on a logarithmic axis; a line marks the length of a step.

    Args:
        table: columns way, called_back (bool), p5, p50, p95 in milliseconds; drawn from top to bottom.
    """
    for place, row in enumerate(table.itertuples()):
        colour = PALETTE[1] if row.called_back else PALETTE[0]
        axes.plot([row.p5, row.p95], [place, place], color=colour, linewidth=6, alpha=0.35, solid_capstyle="butt")
        axes.plot(row.p50, place, "o", color=colour, markersize=9)
        axes.annotate(
            f"{row.p50:.2g}", (row.p50, place), textcoords="offset points", xytext=(0, 9), ha="center", fontsize=10
        )
    axes.axvline(step_ms, color="black", linestyle="--", linewidth=1.2)
    axes.text(step_ms, -0.75, " one step", fontsize=10, va="center")
    log_axis(axes.xaxis, subs=(1,))
    axes.set_yticks(range(len(table)), table["way"])
    axes.set_ylim(len(table) - 0.5, -1.1)
    axes.grid(axis="y", visible=False)
    label(axes, "From the end of a step until Python knows", "late by (ms, log scale)", "")
