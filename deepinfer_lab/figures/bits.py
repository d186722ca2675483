"""What fewer bits save, and what they cost."""

import pandas as pd
from matplotlib.axes import Axes

from deepinfer_lab.figures.style import PALETTE, label, log_axis


def draw_size_and_perplexity(axes: Axes, table: pd.DataFrame) -> None:
    """Perplexity (log scale) against the size of the linear layers, one labelled point per row.

    Args:
        table: columns bits, linear_mb, perplexity.
    """
    for row, colour in zip(table.itertuples(), PALETTE, strict=False):
        axes.plot(row.linear_mb, row.perplexity, "o", color=colour, markersize=11)
        axes.annotate(
            f"{row.bits}: {row.perplexity:.1f}",
            (row.linear_mb, row.perplexity),
            textcoords="offset points",
            xytext=(0, 12),
            ha="center",
        )
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    axes.margins(0.2, 0.25)
    axes.grid(which="minor", alpha=0.4)
    label(axes, "Size against perplexity", "linear layers (MB, log scale)", "perplexity (log scale)")
