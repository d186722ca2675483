"""Two machines, or two commits, side by side."""

import math
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from deepinfer_lab.figures.style import PALETTE, PUBLISHED, label

FLAGGED, WITHIN, UNSURE = PALETTE[1], PALETTE[0], PUBLISHED
ROW_IN = 0.3  # height of a row, which holds two lines
CHARACTERS = 64  # of a label in one line
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # between numbers on a short axis; 1 is a multiple of each


def forest_height_in(table: pd.DataFrame) -> float:
    """How high a picture of all rows has to be, in inches."""
    return 1.7 + ROW_IN * (len(table) + table["experiment"].nunique())


def draw_forest(axes: Axes, table: pd.DataFrame, tolerance: float, title: str) -> None:
    """A line a row: the ratio and its interval on a logarithmic axis, the tolerance around 1 shaded; a headed group an
    experiment. The legend goes below, to the axes' figure.

    Args:
        table: columns experiment, common (what all labels of the experiment would say), label, ratio, low, high (NaN
            without an interval), flagged; at least one row. Groups in the order of their first rows.
        tolerance: as the rows were flagged by.
    """
    at = 0
    ticks: dict[int, str] = {}
    for experiment, group in table.groupby("experiment", sort=False):
        ticks[at] = str(experiment)
        axes.text(
            0.01, at, group["common"].iloc[0], transform=axes.get_yaxis_transform(), va="center", fontsize=9,
            color="#555555", backgroundcolor="white",
        )  # fmt: skip
        for row in group.itertuples():
            at += 1
            sure = not np.isnan(row.low)
            colour = (FLAGGED if row.flagged else WITHIN) if sure else UNSURE
            if sure:
                axes.plot([row.low, row.high], [at, at], color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot(row.ratio, at, "o" if sure else "D", color=colour, markersize=5)
            ticks[at] = fill(row.label, CHARACTERS, max_lines=2, placeholder=" ...", break_on_hyphens=False)
        at += 1
    axes.axvspan(1 / (1 + tolerance), 1 + tolerance, color="#e6e6e6", zorder=0)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    for tick in axes.get_yticklabels():
        if tick.get_text() in set(table["experiment"]):
            tick.set(fontsize=10, fontweight="bold")
    axes.set_ylim(at - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    _ratio_axis(axes, table)
    looks = (
        (f"interval outside of 1 ± {tolerance:.1%}", FLAGGED, "o"),
        ("interval reaches into it", WITHIN, "o"),
        ("no interval: too few samples", UNSURE, "D"),
    )
    handles = [Line2D([], [], color=colour, marker=marker, markersize=5, label=name) for name, colour, marker in looks]
    axes.get_figure().legend(handles=handles, loc="outside lower right", ncols=3, fontsize=9, frameon=False)
    label(axes, title, "B over A (log scale; 1 = the same)", "")


def _ratio_axis(axes: Axes, table: pd.DataFrame) -> None:
    """Logarithmic, with plain numbers, and as many as there is room for."""
    ends = table[["ratio", "low", "high"]].to_numpy()
    low, high = min(float(np.nanmin(ends)), 1 / 1.05), max(float(np.nanmax(ends)), 1.05)
    low, high = low / (high / low) ** 0.05, high * (high / low) ** 0.05
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    if high / low < 4:
        step = next((step for step in STEPS if (high - low) / step <= 7), STEPS[-1])
        locator = FixedLocator([step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)])
    else:
        locator = LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=20)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:.6g}"))
    axes.xaxis.set_minor_locator(NullLocator())
