"""Figures with controls, for notebooks that somebody sits in front of. What they draw is computed by functions without any."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from deepinfer_lab.figures import itl, kernels, style
from deepinfer_lab.kernels import resources
from deepinfer_lab.kernels.catalogue import TILED
from deepinfer_lab.kernels.maps import THREADS

HALF = 2  # bytes


def tile_limits(bm: int, bn: int, bk: int, card: str) -> pd.DataFrame:
    """How many blocks of 256 threads with a tile of bm x bn outputs and bk columns each limit of a multiprocessor allows.

    Shared memory holds bm x bk activations and bk x (bn + 1) weights in fp16. Of registers only the accumulators are counted:
    what else a thread needs, the compiler decides, so that this row is an upper bound.

    Args:
        card: of `resources.CARDS`.

    Returns:
        Columns limit, blocks, occupancy (share of warp slots that so many blocks fill, at most 1), decides (the row with the
        fewest blocks).
    """
    arch = resources.CARDS[card]
    allowed = resources.blocks_by_limit(arch, THREADS, accumulators(bm, bn), tile_bytes(bm, bn, bk))
    table = pd.DataFrame({"limit": list(allowed), "blocks": list(allowed.values())})
    table["occupancy"] = (table["blocks"] * THREADS / 32 / resources.LIMITS[arch].warps).clip(upper=1.0)
    return table.assign(decides=table.index == table["blocks"].idxmin())


def tile_bytes(bm: int, bn: int, bk: int) -> int:
    """Shared memory of one block, bytes."""
    return HALF * (bm * bk + bk * (bn + 1))


def accumulators(bm: int, bn: int) -> int:
    """Registers of a thread that hold its outputs."""
    return bm * bn // THREADS


def roofline(
    measured: pd.DataFrame, bits: int, n: int, k: int, *, group: int, bandwidth: float, peak: float
) -> pd.DataFrame:
    """Every measured launch of a weight, beside what the card allows.

    Args:
        measured: columns bits, m, n, k, kernel, us.
        bandwidth: bytes a second. peak: floating-point operations a second without tensor cores.

    Returns:
        Columns m, kernel, intensity (operations a byte: weights, scales, activations, outputs, each once), roof_tflops,
        bound ("memory" or "arithmetic"), tflops (measured), share (of the roof). Without kernels that use tensor cores.
    """
    of_weight = (measured["bits"] == bits) & (measured["n"] == n) & (measured["k"] == k)
    names = measured["kernel"]  # those that use tensor cores have a roof of their own
    without = ~(names.isin(TILED) | names.str.contains("cublas"))
    table = measured.loc[of_weight & without, ["m", "kernel", "us"]].reset_index(drop=True)
    operations = 2.0 * table["m"] * n * k
    table["intensity"] = operations / (n * k * (bits / 8 + HALF / group) + table["m"] * (n + k) * HALF)
    table["roof_tflops"] = np.minimum(table["intensity"] * bandwidth, peak) / 1e12
    table["bound"] = np.where(table["intensity"] * bandwidth < peak, "memory", "arithmetic")
    table["tflops"] = operations / table.pop("us") / 1e6
    return table.assign(share=table["tflops"] / table["roof_tflops"])


def explore_tiles() -> None:
    """Controls for `tile_limits`."""

    def draw(card: str, bm: int, bn: int, bk: int) -> None:
        table = tile_limits(bm, bn, bk, card)
        _, axes = style.figure(height_in=2.4)
        colours = [style.PALETTE[1] if decides else style.PALETTE[0] for decides in table["decides"]]
        axes[0, 0].barh(table["limit"], table["blocks"], color=colours)
        style.label(axes[0, 0], f"{card}: the shortest bar decides", "blocks of a multiprocessor", "")
        plt.show()
        least = table.loc[table["decides"]].iloc[0]
        print(
            f"{tile_bytes(bm, bn, bk):,} bytes of shared memory, {accumulators(bm, bn)} accumulators a thread: "
            f"at most {least['blocks']} blocks, {least['occupancy']:.0%} of the warps"
        )

    sizes = (16, 32, 64, 128)
    _controls(draw, card=(tuple(resources.CARDS), "H200"), bm=(sizes, 32), bn=((*sizes, 256), 64), bk=(sizes, 32))


def explore_roofline(measured: pd.DataFrame, *, group: int, bandwidth: float, peak: float) -> None:
    """Controls for `roofline`; see there."""
    few = measured[measured["bits"] < 16]
    shapes = {f"{n} x {k}": (n, k) for n, k in few[["n", "k"]].drop_duplicates().itertuples(index=False)}
    rows = tuple(int(m) for m in sorted(few["m"].unique()))

    def draw(shape: str, bits: int, m: int) -> None:
        table = roofline(measured, bits, *shapes[shape], group=group, bandwidth=bandwidth, peak=peak)
        _, axes = style.figure(height_in=4.0)
        intensity = np.geomspace(table["intensity"].min(), table["intensity"].max(), 200)
        axes[0, 0].plot(intensity, np.minimum(intensity * bandwidth, peak) / 1e12, color="black", linewidth=1.5)
        for kernel, points in table.groupby("kernel", sort=False):
            look = kernels.look(kernel)
            axes[0, 0].scatter(points["intensity"], points["tflops"], s=25, alpha=0.4, **look)
            chosen = points[points["m"] == m]
            axes[0, 0].scatter(chosen["intensity"], chosen["tflops"], s=130, label=kernel, **look)
        style.log_axis(axes[0, 0].xaxis)
        style.log_axis(axes[0, 0].yaxis)
        axes[0, 0].legend()
        style.label(axes[0, 0], f"W{bits}, {shape}; large: M = {m}", "operations a byte (log)", "TFLOP/s (log)")
        plt.show()
        print(table[table["m"] == m].to_string(index=False, float_format="{:.2f}".format))

    _controls(draw, shape=(tuple(shapes), next(iter(shapes))), bits=((3, 4), 4), m=(rows, rows[0]))


def explore_chunks(rows: pd.DataFrame) -> None:
    """Controls for disturbed gaps, by policy and chunk.

    Args:
        rows: of the record `long_insertion`: columns policy, chunk, disturbed_itl_ms (lists), document_ttft_ms.
    """

    def draw(policy: str, chunk: int) -> None:
        same = rows[rows["chunk"] == chunk]
        _, axes = style.figure(height_in=3.4)
        itl.draw_ecdf(axes[0, 0], itl.ecdf_table(same, "policy", "disturbed_itl_ms"), policy)
        style.label(axes[0, 0], f"{policy}, chunk {chunk:,}; grey: the others", "gap (ms, log)", "share no longer")
        plt.show()
        print(gaps(same).to_string(index=False, float_format="{:.1f}".format))

    policies, chunks = (tuple(rows[column].unique().tolist()) for column in ("policy", "chunk"))
    _controls(draw, policy=(policies, policies[0]), chunk=(tuple(sorted(chunks)), min(chunks)))


def gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """Disturbed gaps of each row in figures.

    Returns:
        Columns policy, chunk, p50, p99, max (of `disturbed_itl_ms`), document_ttft_ms; in ms, the least max first.
    """
    table = rows[["policy", "chunk"]].copy()
    for name, percent in {"p50": 50, "p99": 99, "max": 100}.items():
        table[name] = [float(np.percentile(found, percent)) for found in rows["disturbed_itl_ms"]]
    return table.assign(document_ttft_ms=rows["document_ttft_ms"]).sort_values("max", ignore_index=True)


def watched() -> bool:
    """Whether the running cell was sent by a frontend with somebody in front of it.

    Jupyter's protocol lets a frontend say with each cell whether it could be asked for input (`allow_stdin`). JupyterLab says
    yes; papermill, nbval and nbconvert say no.
    """
    from IPython import get_ipython

    shell = get_ipython()
    if not hasattr(shell, "get_parent"):  # no shell, or one in a terminal, which has no messages
        return False
    return bool(shell.get_parent()["content"].get("allow_stdin", False))


def _controls(draw: Callable[..., None], **choices: tuple[Sequence[Any], Any]) -> None:
    """A slider for each argument of numbers, a menu for each of names: (options, the first chosen). Draws at each change.

    Nothing happens where nobody watches, so that a published notebook has no output here.
    """
    if not watched():
        return
    try:
        import ipywidgets
    except ImportError:
        print("Controls need ipywidgets: pip install -e '.[explore]' in the project's folder, then reload this page.")
        return
    widgets = {
        name: (ipywidgets.Dropdown if isinstance(value, str) else ipywidgets.SelectionSlider)(
            options=options, value=value, description=name
        )
        for name, (options, value) in choices.items()
    }
    ipywidgets.interact(draw, **widgets)
