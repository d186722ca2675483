"""How every picture looks, how it is saved byte for byte the same, and the line that stands for its table."""

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from deepinfer_lab.errors import SettingError

WIDTH_IN = 9.0
DPI = 100  # 900 px wide, which a notebook page shows unscaled

# Okabe and Ito's colours, distinguishable with every common colour blindness; yellow last, as it is faint on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
PREFILL, DECODE = PALETTE[0], PALETTE[1]  # the same two in every picture
PUBLISHED = "#666666"  # numbers of the article, beside measured ones

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
DESCRIPTION = re.compile(r"<dc:description>([^<]*)</dc:description>")
FINGERPRINT = re.compile(r"table ([A-Za-z0-9_-]+): (\d+) rows x (\d+) columns, sha256 ([0-9a-f]{12})")


@contextmanager
def style() -> Iterator[None]:
    """Draw in the project's style inside this block; matplotlib's settings are put back after it."""
    # Load the backend now: Jupyter's turns `interactive` on as it loads, and loaded inside it would be turned off again.
    plt.switch_backend(matplotlib.get_backend())
    with (
        sns.axes_style("whitegrid"),
        sns.plotting_context("notebook", font_scale=1.05),
        sns.color_palette(PALETTE),
        matplotlib.rc_context(
            {
                "figure.dpi": DPI,
                "savefig.dpi": DPI,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "legend.frameon": False,
                "svg.hashsalt": "deepinfer-lab",  # element ids would be random otherwise
                "svg.fonttype": "path",  # looks the same where matplotlib's font is not installed
            }
        ),
    ):
        yield


def figure(rows: int = 1, columns: int = 1, *, height_in: float = 4.0, **subplots: Any) -> tuple[Figure, np.ndarray]:
    """A new figure, 900 px wide, in the project's style.

    Args:
        rows: of axes.
        columns: of axes.
        height_in: of the whole figure, inches; 100 px each.
        subplots: further arguments of `matplotlib.pyplot.subplots`, such as `sharex`.

    Returns:
        The figure and its axes as an array [rows, columns] of `Axes`.
    """
    with style():
        return plt.subplots(
            rows, columns, figsize=(WIDTH_IN, height_in), layout="constrained", squeeze=False, **subplots
        )


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and axis labels. A label names its unit, such as "inter-token latency (ms)"."""
    axes.set_title(title, loc="left")
    axes.set(xlabel=x, ylabel=y)


def log_axis(axis: Axis, subs: tuple[float, ...] = (1, 2, 5)) -> None:
    """Make an axis logarithmic, labelled with plain numbers (20, 50, 100) rather than powers of ten.

    Args:
        axis: `axes.xaxis` or `axes.yaxis`.
        subs: which multiples of each power of ten get a label.
    """
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(fig: Figure, folder: Path, name: str, table: pd.DataFrame) -> str:
    """Write `folder/<name>.svg`: the same drawing gives the same bytes (no date, no software version, salted ids).

    Args:
        table: what the picture shows. Its fingerprint is the picture's description, so that a file and what a notebook
            printed can be held against each other.

    Returns:
        The fingerprint, for the notebook to print.

    Raises:
        SettingError: a name with other characters than letters, digits, - and _.
    """
    line = fingerprint(table, name)
    picture = io.BytesIO()
    with style():
        fig.savefig(picture, format="svg", metadata={"Date": None, "Creator": None, "Description": line})
    lines = picture.getvalue().decode().splitlines()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_bytes(("\n".join(each.rstrip() for each in lines) + "\n").encode())
    return line


def described(picture: Path) -> str | None:
    """The fingerprint that `save` wrote into a picture; None where there is none."""
    found = DESCRIPTION.search(picture.read_text(encoding="utf-8"))
    return found[1] if found else None


def fingerprint(table: pd.DataFrame, name: str) -> str:
    """The line that stands for a picture where outputs are compared.

    The hash covers the table as CSV, floats rounded to six digits; the index is not part of a tidy table.

    Args:
        table: what the picture shows.
        name: the picture's name.

    Returns:
        Such as "table 00_timeline: 512 rows x 5 columns, sha256 1a2b3c4d5e6f"; `FINGERPRINT` matches it.

    Raises:
        SettingError: a name with other characters than letters, digits, - and _.
    """
    if not NAME.fullmatch(name):
        raise SettingError(f"picture name {name!r}: letters, digits, - and _ only")
    text = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    rows, columns = table.shape
    return f"table {name}: {rows} rows x {columns} columns, sha256 {digest}"
