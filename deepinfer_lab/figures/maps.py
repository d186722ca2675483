"""Where bits, threads and banks lie: pictures of the index formulas in `kernels.maps`, no measurement in them."""

import matplotlib.colors as mcolors
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from deepinfer_lab.figures.style import PALETTE, label
from deepinfer_lab.kernels import maps

UNIT = 8  # values in one unit of the layout
LIGHT = frozenset({"#CC79A7", "#E69F00", "#56B4E9", "#F0E442"})  # of the palette: dark text reads better on them


def bit_table(bits: int) -> pd.DataFrame:
    """The bits of eight packed values, lowest bit of the first byte first.

    Returns:
        Columns byte, bit (of the byte), value (0 to 7), value_bit (of the value).
    """
    position = np.arange(UNIT * bits)
    return pd.DataFrame(
        {"byte": position // 8, "bit": position % 8, "value": position // bits, "value_bit": position % bits}
    )


def draw_bit_layout(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """One row of cells, a cell a bit, a colour a value; values that straddle two bytes are outlined.

    Args:
        table: as `bit_table` returns it.
    """
    for cell in table.itertuples():
        x, colour = cell.byte * 8 + cell.bit, PALETTE[cell.value]
        axes.add_patch(Rectangle((x, 0), 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
        axes.text(x + 0.5, 0.5, str(cell.value_bit), ha="center", va="center", fontsize=9, color=_ink(colour))
    for value, bits in table.groupby("value"):
        start, width = int(bits.index[0]), len(bits)
        straddles = bits["byte"].nunique() > 1
        name = f"q{value}"
        axes.text(start + width / 2, 1.12, name, ha="center", fontsize=11, fontweight="bold" if straddles else "normal")
        if straddles:
            axes.add_patch(Rectangle((start, 0), width, 1, fill=False, edgecolor="black", linewidth=2.5, zorder=3))
    for byte in range(table["byte"].max() + 1):
        axes.annotate("", (byte * 8, -0.2), (byte * 8 + 8, -0.2), arrowprops={"arrowstyle": "<->", "linewidth": 1})
        axes.text(byte * 8 + 4, -0.55, f"byte {byte}", ha="center", fontsize=10)
    axes.set(xlim=(-0.2, 32.2), ylim=(-0.7, 1.5))
    axes.set_axis_off()
    axes.set_title(title, loc="left")


def unpack_table(bits: int) -> pd.DataFrame:
    """Who writes which cell of shared_b [32 k, 64 n]: one row a cell, sorted.

    Returns:
        Columns k, n, thread, warp, lane, store (which of the thread's eight), straddles (its bits lie in two bytes).
    """
    cells = maps.unpack_map(bits)
    thread = np.broadcast_to(np.arange(maps.THREADS)[:, None], cells.k.shape)
    store = np.broadcast_to(np.arange(cells.k.shape[1]), cells.k.shape)
    table = pd.DataFrame(
        {
            "k": cells.k.ravel(),
            "n": cells.n.ravel(),
            "thread": thread.ravel(),
            "warp": thread.ravel() // maps.WARP,
            "lane": thread.ravel() % maps.WARP,
            "store": store.ravel(),
            "straddles": (cells.first_byte != cells.last_byte).ravel(),
        }
    )
    return table.sort_values(["k", "n"], ignore_index=True)


def draw_unpack_map(axes: Axes, table: pd.DataFrame, title: str, columns: int = 64, lanes: bool = False) -> None:
    """shared_b, a colour for each warp that fills it.

    Args:
        table: as `unpack_table` returns it.
        columns: how many of the 64 columns to draw.
        lanes: write the lane's number into each cell; legible for a few columns.
    """
    shown = table[table["n"] < columns]
    warps = shown.pivot(index="k", columns="n", values="warp").to_numpy()
    colours = mcolors.ListedColormap(PALETTE)
    axes.imshow(warps, cmap=colours, vmin=-0.5, vmax=7.5, aspect="auto", interpolation="nearest", alpha=0.75)
    if lanes:
        for cell in shown.itertuples():
            colour = PALETTE[cell.warp]
            axes.text(cell.n, cell.k, str(cell.lane), ha="center", va="center", fontsize=8, color=_ink(colour))
    axes.grid(visible=False)
    label(axes, title, "n in the tile", "k in the tile")


def output_table() -> pd.DataFrame:
    """Who computes which of a block's 32 x 64 outputs: columns m, n, thread, warp, lane; one row an output, sorted."""
    cells = maps.output_map()
    thread = np.broadcast_to(np.arange(maps.THREADS)[:, None], cells.row.shape).ravel()
    table = pd.DataFrame(
        {
            "m": cells.row.ravel(),
            "n": cells.column.ravel(),
            "thread": thread,
            "warp": thread // maps.WARP,
            "lane": thread % maps.WARP,
        }
    )
    return table.sort_values(["m", "n"], ignore_index=True)


def draw_output_map(axes: Axes, table: pd.DataFrame, title: str) -> None:
    """A block's outputs: a colour for each warp, a frame and a lane's number for each thread's 2 x 4.

    Args:
        table: as `output_table` returns it.
    """
    warps = table.pivot(index="m", columns="n", values="warp").to_numpy()
    colours = mcolors.ListedColormap(PALETTE)
    axes.imshow(warps, cmap=colours, vmin=-0.5, vmax=7.5, aspect="auto", interpolation="nearest", alpha=0.75)
    for _, cells in table.groupby("thread"):
        left, top = cells["n"].min() - 0.5, cells["m"].min() - 0.5
        wide, high = cells["n"].nunique(), cells["m"].nunique()
        axes.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor="white", linewidth=0.8))
        first = cells.iloc[0]
        ink = _ink(PALETTE[first["warp"]])
        axes.text(left + wide / 2, top + high / 2, str(first["lane"]), ha="center", va="center", fontsize=8, color=ink)
    axes.grid(visible=False)
    label(axes, title, "n in the tile", "m in the tile")


def bank_table(bits: int) -> pd.DataFrame:
    """What the first unpacking store of warp 0 asks of each bank, without and with the 65th column.

    Returns:
        Columns row_length (64 or 65), bank, words: different words that the bank must deliver one after the other.
    """
    parts = []
    for stride in (maps.UNPADDED, maps.PADDED):
        lanes = maps.b_write_offsets(bits, stride)[0, 0]
        words = np.unique(lanes // maps.WORD_HALVES)
        count = np.bincount(words % maps.BANKS, minlength=maps.BANKS)
        parts.append(pd.DataFrame({"row_length": stride, "bank": np.arange(maps.BANKS), "words": count}))
    return pd.concat(parts, ignore_index=True)


def draw_banks(axes: Axes, table: pd.DataFrame, row_length: int, title: str) -> None:
    """Words per bank; the tallest bar is the number of turns that the store takes.

    Args:
        table: as `bank_table` returns it.
        row_length: 64 or 65.
    """
    shown = table[table["row_length"] == row_length]
    turns = int(shown["words"].max())
    axes.bar(shown["bank"], shown["words"], color=PALETTE[1] if turns > 2 else PALETTE[2], width=0.8)
    axes.set_ylim(0, max(table["words"].max(), 2) * 1.12)
    axes.set_xticks(range(0, maps.BANKS, 8))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.text(0.98, 0.9, f"{turns} turn{'s' * (turns > 1)}", transform=axes.transAxes, ha="right", fontsize=12)
    label(axes, title, "bank", "words")


def _ink(colour: str) -> str:
    return "black" if colour in LIGHT else "white"
