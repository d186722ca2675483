"""Requests in a system over time, and what load does to those who wait."""

import pandas as pd
from matplotlib.axes import Axes

from deepinfer_lab.figures.itl import LOOKS
from deepinfer_lab.figures.style import PALETTE, label

LOOPS = {"closed": ("-", 1.8), "poisson": ("--", 1.6), "bursty": (":", 1.8)}  # line and width


def draw_in_system(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """The number of requests in a system, a step line a series.

    Args:
        table: columns series, at_s, count; a count holds from its time to the next one's. Series in the order of first rows.
    """
    for number, (series, its) in enumerate(table.groupby("series", sort=False)):
        axes.step(its["at_s"], its["count"], where="post", color=PALETTE[number], label=series, linewidth=1.4)
    axes.set_ylim(0)
    axes.margins(x=0.01)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    label(axes, title, "time (s)", "requests in the system")


def draw_load(axes: Axes, table: pd.DataFrame, x: str, y: str, title: str, x_unit: str, y_unit: str) -> None:
    """One quantity against another, a colour a policy and a line style a loop.

    Args:
        table: columns policy, loop (one of `LOOPS`), `x` and `y`; points of a line in their order. Where several loops are
            drawn, labels say which.
    """
    several = table["loop"].nunique() > 1
    for (policy, loop), its in table.groupby(["policy", "loop"], sort=False):
        colour, marker = LOOKS[policy]
        line, width = LOOPS[loop]
        name = f"{policy}, {loop}" if several else policy
        axes.plot(its[x], its[y], line, color=colour, linewidth=width, marker=marker, markersize=6, label=name)
    axes.set_ylim(0)
    label(axes, title, x_unit, y_unit)
