"""Kernels against one another, against the article, and against what memory allows."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from deepinfer_lab.figures.style import PALETTE, PUBLISHED, label

# One colour and one marker for each design, whatever its bits: (colour, marker).
LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "gemv": (PALETTE[5], "*"),
        "gemv_grid_y": (PALETTE[0], "o"),
        "gemv_batch_tile": (PALETTE[1], "s"),
        "gemv_warp_tile": (PALETTE[2], "^"),
        "tiled_gemm": (PALETTE[3], "D"),
        "tiled_gemm_split_k": ("#8C510A", "P"),
        "dequant_cublas": (PALETTE[4], "v"),
        "dequantise_cublas": (PALETTE[4], "<"),
        "mma_small": ("#44AA99", "h"),
        "mma_block": ("#882255", "8"),
        "wide": ("#661100", "H"),
        "cublas_fp16": (PALETTE[6], "x"),
    }
)
FLOOR = "#999999"


def look(kernel: str) -> dict[str, str]:
    """Colour and marker of a kernel: w3_tiled_gemm's are w4_tiled_gemm's."""
    colour, marker = LOOKS[design(kernel)]
    return {"color": colour, "marker": marker}


def draw_speedups(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """Horizontal bars from 1, to the right where faster and to the left where slower: one group a shape, one bar a source.

    Args:
        table: columns shape, source, speedup; sources in the order of their first rows, the article's first.
    """
    shapes, sources = table["shape"].unique(), table["source"].unique()
    high = 0.8 / len(sources)
    for number, source in enumerate(sources):
        found = table[table["source"] == source].set_index("shape")["speedup"].reindex(shapes)
        y = np.arange(len(shapes)) + (number - (len(sources) - 1) / 2) * high
        colour = PUBLISHED if number == 0 else PALETTE[number - 1]
        axes.barh(y, found - 1, left=1, height=high * 0.9, color=colour, label=source)
        for at, value in zip(y, found, strict=True):
            if np.isfinite(value):
                side, beside = ("left", 1.03) if value >= 1 else ("right", 1 / 1.03)
                axes.text(value * beside, at, f"{value:.2f}x", va="center", ha=side, fontsize=9)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.3, table["speedup"].min() * 0.7), table["speedup"].max() * 1.8)
    _plain_numbers(axes, "x")
    axes.set_yticks(range(len(shapes)), shapes)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=10)
    label(axes, title, "times as fast as the old fallback (log scale; 1 = equal)", "")


def draw_crossover(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """Time against M, a line a kernel, both axes logarithmic, with the floor that memory sets under all of them.

    Args:
        table: columns m, kernel, us, floor_us; floor_us of a kernel that reads few-bit weights is drawn.
    """
    _lines(axes, table, "m")
    axes.set_yscale("log")
    axes.grid(which="minor", axis="y", alpha=0.3)
    _plain_numbers(axes, "y")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(table["m"].unique()), minor=False)
    axes.set_xticklabels([str(m) if m != 9 else "" for m in sorted(table["m"].unique())])
    axes.xaxis.set_minor_locator(NullLocator())
    label(axes, title, "rows M (log scale)", "time of one launch (µs, log scale)")


def draw_small_batch(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """Time against batch, a line a kernel, from zero: what is paid once and what for each row can be read off it.

    Args:
        table: columns batch, kernel, us, floor_us.
    """
    _lines(axes, table, "batch")
    axes.set_xticks(sorted(table["batch"].unique()))
    axes.set_ylim(0, table["us"].max() * 1.08)
    label(axes, title, "rows in the batch", "time of one launch (µs)")


def draw_resources(axes: Axes, table: pd.DataFrame, value: str, title: str, unit: str, form: str = "{:.0f}") -> None:
    """One group a kernel, one bar an architecture.

    Args:
        table: columns kernel, arch and `value`.
        form: how to write a value beside its bar.
    """
    kernels, archs = table["kernel"].unique(), table["arch"].unique()
    high = 0.8 / len(archs)
    for number, arch in enumerate(archs):
        found = table[table["arch"] == arch].set_index("kernel")[value].reindex(kernels)
        y = np.arange(len(kernels)) + (number - (len(archs) - 1) / 2) * high
        axes.barh(y, found, height=high * 0.9, color=PALETTE[number], label=arch)
        for at, length in zip(y, found, strict=True):
            axes.text(length, at, " " + form.format(length), va="center", fontsize=9)
    axes.set_yticks(range(len(kernels)), kernels)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.grid(axis="y", visible=False)
    label(axes, title, unit, "")


def _lines(axes: Axes, table: pd.DataFrame, by: str) -> None:
    """Lines in a fixed order of kernels, named without their bits; a kernel of one point is a marker."""
    order = [k for k in LOOKS if k in {design(kernel) for kernel in table["kernel"]}]
    for kernel in sorted(table["kernel"].unique(), key=lambda name: order.index(design(name))):
        line = table[table["kernel"] == kernel].sort_values(by)
        size = 13 if look(kernel)["marker"] == "*" else 6
        axes.plot(line[by], line["us"], label=design(kernel), linewidth=1.8, markersize=size, **look(kernel))
    few = table[table["kernel"] != "cublas_fp16"].groupby(by)["floor_us"].min()
    axes.plot(few.index, few, color=FLOOR, linestyle="--", linewidth=1.5, label="memory floor")


def design(kernel: str) -> str:
    """A kernel's name without its bits."""
    return kernel[3:] if kernel[:3] in ("w3_", "w4_") else kernel


def _plain_numbers(axes: Axes, which: str) -> None:
    """1, 2, 5, 10, ... on a logarithmic axis, not powers of ten."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
