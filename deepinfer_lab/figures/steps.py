"""What whole decode steps take, by how they are launched."""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd
from matplotlib.axes import Axes

from deepinfer_lab.figures.kernels import FLOOR
from deepinfer_lab.figures.style import PALETTE, label

COLOURS: Mapping[str, str] = MappingProxyType({"launches": PALETTE[0], "chain": PALETTE[1]})
LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))  # of the fewest rows first


def draw_steps(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """Time over context, a line for each way and number of rows; crosses at what was predicted; below, a line at the floor of
    the fewest rows.

    Args:
        table: columns way (of `COLOURS`), rows, context, us, predicted_us, floor_us; one model.
    """
    every = sorted(table["rows"].unique())
    for (way, rows), its in table.groupby(["way", "rows"], sort=False):
        its = its.sort_values("context")
        line, marker = LINES[every.index(rows) % len(LINES)]
        name = f"{way}, {rows} row{'s' if rows > 1 else ''}"
        look = {"color": COLOURS[way], "linestyle": line, "marker": marker, "markersize": 5, "linewidth": 1.8}
        axes.plot(its["context"], its["us"], label=name, **look)
        axes.plot(its["context"], its["predicted_us"], "x", color=COLOURS[way], markersize=7)
    fewest = table[table["rows"] == every[0]].drop_duplicates("context").sort_values("context")
    axes.plot(fewest["context"], fewest["floor_us"], "--", color=FLOOR, linewidth=1.4, label="memory floor")
    axes.set_ylim(0, 1.08 * table[["us", "predicted_us", "floor_us"]].max().max())
    contexts = sorted(table["context"].unique())
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.tick_params(labelsize=9)
    label(axes, title, "", "")
