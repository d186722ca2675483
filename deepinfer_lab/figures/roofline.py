"""What a machine could do at most, and where measurements lie below it."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from deepinfer_lab.figures.style import PALETTE, PUBLISHED, label, log_axis

MARKERS = "o^sDvPX*"


def draw_roof(
    axes: Axes, bytes_per_s: float, flops_per_s: float, span: tuple[float, float], name: str, dashed: bool = False
) -> None:
    """min(peak, intensity * bandwidth) over a span of intensities, in TFLOPS."""
    ridge = flops_per_s / bytes_per_s
    x = np.array(sorted({span[0], ridge, span[1]}))
    look = {"color": PUBLISHED, "linestyle": "--", "linewidth": 1.2} if dashed else {"color": "black", "linewidth": 1.8}
    axes.plot(x, np.minimum(flops_per_s, x * bytes_per_s) / 1e12, label=name, **look)


def draw_points(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """Measured points under a roof, a marker a series, each with its name beside it.

    Args:
        table: columns series, name, intensity (FLOPs a byte), tflops; series in the order of their first rows. A series is
            joined by a thin line where its names are numbers.
    """
    for number, (series, points) in enumerate(table.groupby("series", sort=False)):
        colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
        line = "none" if any(isinstance(name, str) for name in points["name"]) else "-"
        axes.plot(
            points["intensity"], points["tflops"], marker, linestyle=line, color=colour, linewidth=0.8, markersize=7,
            label=series,
        )  # fmt: skip
        for point in points.itertuples():
            axes.annotate(
                point.name,
                (point.intensity, point.tflops),
                xytext=(6, -9),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    log_axis(axes.xaxis, subs=(1,))
    log_axis(axes.yaxis, subs=(1,))
    label(axes, title, "arithmetic intensity (FLOPs a byte, log scale)", "TFLOPS (log scale)")


def draw_parts(
    axes: Axes,
    table: pd.DataFrame,
    parts: dict[str, str],
    title: str,
    unit: str,
    *,
    form: str | None = None,
    limit: tuple[float, str] | None = None,
) -> None:
    """Horizontal bars made of parts, one a row, from top to bottom.

    Args:
        table: a column `name`, and one for each part, none negative.
        parts: columns of the table and their colours, from left to right.
        form: how a bar's sum is written beside it; None writes nothing.
        limit: where to draw a line, and what to call it.
    """
    left = np.zeros(len(table))
    y = np.arange(len(table))
    for part, colour in parts.items():
        axes.barh(y, table[part], left=left, height=0.7, color=colour, label=part, linewidth=0)
        left += table[part].to_numpy(float)
    if form is not None:
        for at, end in zip(y, left, strict=True):
            axes.annotate(
                form.format(end), (end, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
        axes.set_xlim(0, max(left) * 1.12)
    if limit is not None:
        axes.axvline(limit[0], color="black", linestyle="--", linewidth=1.4, label=limit[1])
    axes.set_yticks(y, table["name"])
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    label(axes, title, unit, "")
