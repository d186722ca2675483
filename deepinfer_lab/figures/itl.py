"""Gaps between tokens: small traces that teach, one reader's gaps in time, their distribution, and what they are paid with."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from deepinfer_lab.figures.style import DECODE, PALETTE, PREFILL, PUBLISHED, label, log_axis

# One colour and one marker for each policy, in every picture.
LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serial": (PALETTE[6], "o"),
        "dual-stream": (PALETTE[1], "s"),
        "dual-stream-async": (PALETTE[4], "D"),
        "priority": (PALETTE[0], "^"),
        "dynamic-chunk": (PALETTE[5], "v"),
        "time-sliced": ("#8C510A", "P"),
        "mixed": (PALETTE[3], "X"),
        "partition": (PALETTE[2], "<"),
        "adaptive": ("#882255", "*"),
    }
)


def look_of(source: str) -> tuple[str, str] | None:
    """Colour and marker of a policy, also with a share behind it ("partition 1/8"); None for what is no policy."""
    return LOOKS.get(source.split()[0])


def front(table: pd.DataFrame, x: str, y: str) -> pd.Series:
    """Which rows no other row beats: none is at least as low in both columns, and lower in one."""
    points = table[[x, y]].to_numpy(float)
    no_higher = (points[None] <= points[:, None]).all(axis=2)
    lower = (points[None] < points[:, None]).any(axis=2)
    return pd.Series(~(no_higher & lower).any(axis=1), index=table.index)


def ecdf_table(gaps: pd.DataFrame, by: str, column: str) -> pd.DataFrame:
    """Lists of gaps as one row a gap, sorted within their group.

    Args:
        gaps: columns `by` and `column`, which holds lists.

    Returns:
        Columns `by`, itl_ms, share: of gaps in the group that are no longer than this one.
    """
    table = gaps[[by, column]].explode(column).rename(columns={column: "itl_ms"}).dropna()
    table["itl_ms"] = table["itl_ms"].astype(float)
    table["order"] = table[by].map({key: number for number, key in enumerate(gaps[by].unique())})
    table = table.sort_values(["order", "itl_ms"], ignore_index=True).drop(columns="order")
    groups = table.groupby(by, sort=False)["itl_ms"]
    table["share"] = (groups.cumcount() + 1) / groups.transform("size")
    return table


def draw_traces(axes: Axes, table: pd.DataFrame) -> None:
    """Small traces, one a row: blue from send to first token, then a tick for every token, with their number where
    several come at once.

    Args:
        table: columns trace, token, at_ms; traces in the order of their first rows. Sent at 0.
    """
    names = table["trace"].unique()
    for y, name in enumerate(names):
        at = table.loc[table["trace"] == name, "at_ms"]
        axes.barh(y, at.iloc[0], height=0.5, color=PREFILL, alpha=0.55, linewidth=0)
        axes.barh(y, at.iloc[-1] - at.iloc[0], left=at.iloc[0], height=0.5, color=DECODE, alpha=0.35, linewidth=0)
        axes.plot(at, [y] * len(at), "|", color="black", markersize=13, markeredgewidth=1.3)
        for moment, together in at.value_counts().items():
            if together > 1:
                axes.annotate(f"{together}", (moment, y), textcoords="offset points", xytext=(3, -4), fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    label(axes, "Blue: until the first token. A tick: a token arrives", "time since the request was sent (ms)", "")


def draw_reader(axes: Axes, times_ms: list[float], first_token_ms: float, steady_ms: float, title: str) -> None:
    """One reader's gaps, as wide and as high as they are long, around the window of a document's insertion (shaded).

    Args:
        times_ms: when its tokens came, from the document's send on.
        first_token_ms: when the document's came.
        steady_ms: the median gap without a document, a dashed line.
    """
    axes.axvspan(0, first_token_ms, color=PREFILL, alpha=0.12, linewidth=0)
    axes.stairs(np.diff(times_ms), times_ms, fill=True, color=DECODE)
    axes.axhline(steady_ms, color="black", linestyle="--", linewidth=1)
    label(axes, title, "", "")


def draw_ecdf(axes: Axes, table: pd.DataFrame, policy: str) -> None:
    """Share of one policy's gaps that are no longer than x; the other policies' lines are grey, to compare with.

    Args:
        table: as `ecdf_table` returns it, by "policy".
    """
    for other, group in table.groupby("policy", sort=False):
        if other != policy:
            some = group.iloc[:: 1 + len(group) // 60]  # enough to compare with
            axes.step(some["itl_ms"], some["share"], where="post", linewidth=0.8, color="#CCCCCC")
    its = table[table["policy"] == policy]
    axes.step(its["itl_ms"], its["share"], where="post", linewidth=2.4, color=LOOKS[policy][0])
    log_axis(axes.xaxis)
    axes.set_ylim(0, 1.03)
    label(axes, policy, "", "")


def apart(wanted: Sequence[float], least: float) -> np.ndarray:
    """Where to write labels: as near to where they are wanted as possible, in that order, and `least` apart.

    Neighbours that would be too near form a block, which is centred on what its members want.
    """
    order = np.argsort(wanted, kind="stable")
    blocks: list[list[int]] = []

    def middle(block: list[int]) -> float:
        return float(np.mean([wanted[i] for i in block]))

    for index in order:
        blocks.append([int(index)])
        while len(blocks) > 1:
            lower, upper = blocks[-2:]
            if middle(upper) - middle(lower) >= least * (len(lower) + len(upper)) / 2:
                break
            blocks[-2:] = [lower + upper]
    placed = np.empty(len(wanted))
    for block in blocks:
        placed[block] = middle(block) + least * (np.arange(len(block)) - (len(block) - 1) / 2)
    return placed


def draw_pareto(axes: Axes, table: pd.DataFrame, x: str, y: str, title: str, x_label: str, y_label: str) -> None:
    """Two costs against each other, both logarithmic, lower left is better: a line a source through its chunk sizes.

    A marker grows with the chunk. Names stand at the right, each beside the right end of its line. Sources other than
    policies, two at most, are grey, with their chunks written beside them. The dotted stairs are the front of the policies.

    Args:
        table: columns source, chunk, `x`, `y`; a source is a policy, as `look_of` takes it, or somebody else's engine.
    """
    ours = table["source"].map(look_of).notna()
    places = (
        ("d", (-6, -13), "right"),
        ("h", (6, 6), "left"),
    )  # marker; of a chunk's text the offset and the alignment
    others = dict(zip(table.loc[~ours, "source"].unique(), places, strict=False))
    ends = []  # of lines: colour, name, x, y
    for source, line in table.groupby("source", sort=False):
        line = line.sort_values("chunk")
        look = look_of(source)
        colour, marker = look or (PUBLISHED, others[source][0])
        axes.plot(line[x], line[y], color=colour, linewidth=1.2, alpha=0.8, linestyle="-" if look else "--")
        sizes = 30 * (line["chunk"] / table["chunk"].min()) ** 0.35
        axes.scatter(
            line[x], line[y], s=sizes, zorder=3, edgecolors="white", linewidths=0.6, color=colour, marker=marker
        )
        if look is None:
            _, offset, side = others[source]
            for at in line.itertuples():
                axes.annotate(
                    f"{at.chunk:,}", (getattr(at, x), getattr(at, y)), textcoords="offset points", xytext=offset, ha=side,
                    fontsize=9, color=PUBLISHED,
                )  # fmt: skip
        end = line.loc[line[x].idxmax()]
        ends.append((colour, source, end[x], end[y]))
    best = table[ours & front(table.where(ours), x, y)].sort_values(x)
    axes.step(best[x], best[y], where="post", color="black", linestyle=":", linewidth=1.5)
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    axes.margins(x=0.06, y=0.08)
    axes.autoscale_view()
    low, high = np.log(axes.get_ylim())
    heights = apart([(np.log(end[3]) - low) / (high - low) for end in ends], 0.055)
    for (colour, name, *point), height in zip(ends, heights, strict=True):
        axes.annotate(
            name, point, xytext=(1.04, height), textcoords="axes fraction", va="center", fontsize=10, color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip
    label(axes, title, x_label, y_label)


def draw_grid(axes: Axes, table: pd.DataFrame, value: str, title: str, form: str = "{:.0f}") -> None:
    """A map of chunk size (down) by pieces in flight (right), each cell with its number; darker is more.

    Args:
        table: columns chunk, max_in_flight and `value`.
    """
    grid = table.pivot(index="chunk", columns="max_in_flight", values=value)
    axes.imshow(grid.to_numpy(float), cmap="Blues", aspect="auto")
    middle = (grid.min().min() + grid.max().max()) / 2
    for (row, column), number in np.ndenumerate(grid.to_numpy(float)):
        if np.isfinite(number):
            ink = "white" if number > middle else "black"
            axes.text(column, row, form.format(number), ha="center", va="center", color=ink)
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_yticks(range(len(grid)), grid.index)
    axes.grid(visible=False)
    label(axes, title, "pieces of work in flight, at most", "chunk (tokens)")
