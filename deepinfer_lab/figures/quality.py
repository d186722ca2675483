"""What quantising costs: size against perplexity, and which parts of a model mind."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from deepinfer_lab.figures.style import PALETTE, PUBLISHED, label, log_axis

MARKERS = "osD^vPX"


def draw_pareto(axes: Axes, table: pd.DataFrame, unquantised: float) -> None:
    """Perplexity (log scale) against size, a line a series; the article's plan is ringed, lower left is better.

    Args:
        table: columns series, bits, mb, perplexity; bits "mixed" is the article's plan. Series in the order of their first
            rows, at most seven.
        unquantised: perplexity of the model before, a dashed line.
    """
    for series, colour, marker in zip(table["series"].unique(), PALETTE, MARKERS, strict=False):
        line = table[table["series"] == series].sort_values("mb")
        axes.plot(line["mb"], line["perplexity"], color=colour, marker=marker, markersize=7, label=series)
    article = table[table["bits"] == "mixed"]
    axes.plot(
        article["mb"], article["perplexity"], "o", color=PUBLISHED, fillstyle="none", markersize=15,
        label="the article's plan: MLP 3 bits, attention 4",
    )  # fmt: skip
    axes.axhline(unquantised, color="black", linestyle="--", linewidth=1.2, label=f"unquantised: {unquantised:.1f}")
    log_axis(axes.yaxis, subs=(1, 1.5, 2, 3, 4, 5, 7))
    axes.margins(y=0.08)
    axes.legend(fontsize=10)
    label(axes, "Size against perplexity", "linear layers (MB)", "perplexity (log scale)")


def draw_sensitivity(axes: Axes, table: pd.DataFrame, value: str, title: str, unit: str) -> None:
    """A map of the model, blocks from left to right and the parts of a block from top to bottom, on a logarithmic scale.

    Args:
        table: columns block, unit and `value`, which must be positive; units in the order of their first rows.
        unit: of `value`, beside the colours.
    """
    grid = table.pivot(index="unit", columns="block", values=value).loc[table["unit"].unique()]
    colours = axes.pcolormesh(
        grid.columns,
        range(len(grid)),
        grid.to_numpy(),
        cmap="viridis",
        norm=LogNorm(),
        edgecolors="white",
        linewidth=0.5,
    )
    axes.figure.colorbar(colours, ax=axes, label=unit, pad=0.01)
    axes.set_yticks(range(len(grid)), grid.index)
    axes.invert_yaxis()
    axes.grid(visible=False)
    label(axes, title, "block", "")
