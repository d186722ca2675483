"""The dispatch table that a card's own measurements ask for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from deepinfer_lab.errors import RecordError
from deepinfer_lab.kernels.dispatch import FALLBACK, Row, validate
from deepinfer_lab.lab import project, provenance
from deepinfer_lab.lab.kernel_cells import FEW_BIT, summary
from deepinfer_lab.lab.kernel_timing import GRAPH_COLD
from deepinfer_lab.lab.record import Record

FILE = "dispatch.json"  # of a card's table, beside its records
TIE = 0.03  # times closer than this are noise: a kernel must gain more to take the place of another


def sweep(record: Record) -> pd.DataFrame:
    """The cold times of the record's sweep over M, one row each with its median `us`. Incorrect results are left out.

    Raises:
        RecordError: not a complete `tiled_gemm` record.
    """
    if record.experiment != "tiled_gemm" or not record.whole:
        raise RecordError(f"{record.experiment}, status {record.status}: a dispatch table needs a complete tiled_gemm")
    rows = summary(record.frame())
    shapes = {tuple(shape) for shape in record.params["sweep_shapes"]}
    swept = np.array([shape in shapes for shape in zip(rows["n"], rows["k"], strict=True)])
    return rows[swept & rows["correct"] & (rows["method"] == GRAPH_COLD) & rows["m"].isin(record.params["sweep_m"])]


def derive_dispatch(record: Record) -> tuple[Row, ...]:
    """The table that a `tiled_gemm` record asks for: the fastest kernels by the geometric mean over the sweep's shapes, cold.

    Raises:
        RecordError: as `sweep` and `general_rows`.
    """
    rows = sweep(record)
    table = general_rows(rows[rows["bits"] != 16])
    validate(table, f"dispatch table of {record.provenance['device_slug']}")
    return table


def general_rows(times: pd.DataFrame) -> tuple[Row, ...]:
    """Rows for any shape: the fastest kernel by M, geometric mean over all shapes, of those that were timed on every one.

    Between two measured M the winner of the larger one is taken: more rows never cost less, so its time there is a bound, and
    the other's has none. Of kernels within 3% of the fastest, the one in use at the M before stays; where it is not among them,
    the simplest is taken. The last range has no upper end.

    Args:
        times: one correct result a row: bits, m, n, k, kernel, us.

    Raises:
        RecordError: no row; M = 1, or any larger M, was not measured; or no kernel is right on every shape at some M.
    """
    if times.empty:
        raise RecordError("there is no correct row of a few-bit kernel to choose from")
    return tuple(row for bits, of_bits in times.groupby("bits", sort=False) for row in _ranges(int(bits), of_bits))


def shape_rows(times: pd.DataFrame) -> tuple[Row, ...]:
    """Rows that name their shape, for each shape that was measured; otherwise as `general_rows`."""
    return tuple(
        replace(row, n=int(n), k=int(k))
        for (bits, n, k), of_shape in times.groupby(["bits", "n", "k"], sort=False)
        for row in _ranges(int(bits), of_shape)
    )


def card_table() -> Path | None:
    """The published dispatch table of the card at hand; None where there is none."""
    table = project.data() / provenance.device_slug() / FILE
    return table if table.is_file() else None


def newest_table() -> Path | None:
    """What experiments measure with: the table that `tune` has left in `build/` for this card, which is published with their
    records, or else the published one; None without either."""
    tuned = project.build() / "data" / provenance.device_slug() / FILE
    return tuned if tuned.is_file() else card_table()


def _ranges(bits: int, times: pd.DataFrame) -> list[Row]:
    if times["m"].min() != 1:
        raise RecordError(f"the times of {bits} bits begin at M = {times['m'].min()}; a table begins at M = 1")
    if times["m"].max() == 1:
        raise RecordError(f"the times of {bits} bits are of M = 1 alone; a table needs a larger M too")
    shapes = times[["n", "k"]].drop_duplicates().shape[0]
    ranges: list[Row] = []
    for m, of_m in times.assign(log_us=np.log(times["us"])).groupby("m"):
        by_kernel = of_m.groupby("kernel")["log_us"].agg(["mean", "count"])
        mean = by_kernel.loc[by_kernel["count"] == shapes, "mean"]
        if mean.empty:
            raise RecordError(f"{bits} bits, M = {m}: no kernel has a correct result on all {shapes} shapes")
        close = set(mean[mean <= mean.min() + np.log1p(TIE)].index)
        before = ranges[-1].kernel if ranges else None
        kernel = before if before in close else next(name for name in (*FEW_BIT, FALLBACK) if name in close)
        if kernel == before:
            ranges[-1] = replace(ranges[-1], m_max=int(m))
        else:
            ranges.append(Row(bits, ranges[-1].m_max + 1 if ranges else 1, int(m), kernel))
    return [*ranges[:-1], replace(ranges[-1], m_max=None)]
