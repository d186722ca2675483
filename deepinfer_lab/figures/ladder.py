"""Rungs of a ladder of kernels, predicted and measured, and a kernel of ours among other people's."""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from deepinfer_lab.figures.kernels import FLOOR, design, look
from deepinfer_lab.figures.style import PALETTE, PUBLISHED, label, log_axis

# A line's look, by what it is of.
LINES: Mapping[str, dict[str, object]] = MappingProxyType(
    {
        "ours": {"color": PALETTE[1], "marker": "o", "linewidth": 2.2, "markersize": 5},
        "best peer": {"color": PUBLISHED, "marker": "s", "linewidth": 1.4, "markersize": 4},
        "cuBLAS fp16": {"color": PALETTE[6], "marker": "x", "linewidth": 1.2, "markersize": 5},
        "memory floor": {"color": FLOOR, "linestyle": "--", "linewidth": 1.4},
    }
)


def draw_ladder(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """A bar a rung, from top to bottom, to the measured time; a black mark at the predicted one; a line at the memory floor.

    Args:
        table: columns kernel, us, predicted_us, floor_us; one product. The least floor is drawn, which few-bit weights have.
    """
    lowest = table[["us", "predicted_us", "floor_us"]].min().min() * 0.6
    axes.set_xlim(lowest, table[["us", "predicted_us"]].max().max() * 2.2)
    log_axis(axes.xaxis, subs=(1, 3))
    axes.xaxis.set_minor_locator(NullLocator())
    for at, row in enumerate(table.itertuples()):
        axes.barh(at, row.us - lowest, left=lowest, height=0.62, color=look(row.kernel)["color"], linewidth=0)
        for colour, width in (("white", 4.5), ("black", 2.2)):  # to be seen on a black bar, too
            axes.plot([row.predicted_us] * 2, [at - 0.4, at + 0.4], color=colour, linewidth=width)
        beside = max(row.us, row.predicted_us) * 1.06
        axes.text(beside, at, f"{row.us:,.1f}" if row.us < 100 else f"{row.us:,.0f}", va="center", fontsize=8)
    axes.axvline(table["floor_us"].min(), color=FLOOR, linestyle="--", linewidth=1.4)
    axes.set_yticks(range(len(table)), [design(kernel) for kernel in table["kernel"]], fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    label(axes, title, "", "")


def draw_against(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """Time against M, both logarithmic, a line a series in the order of `LINES`; what is NaN is left out.

    Args:
        table: columns m, series (of `LINES`), us.
    """
    for series, its in LINES.items():
        line = table[table["series"] == series].dropna(subset="us").sort_values("m")
        if len(line):
            axes.plot(line["m"], line["us"], label=series, **its)
    log_axis(axes.yaxis)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xscale("log", base=2)
    ticks = [m for m in (1, 4, 16, 64, 256, 2048) if m <= table["m"].max()]
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=9)
    label(axes, title, "", "")
