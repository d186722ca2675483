"""The dispatch table that a card's own measurements ask for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deepinfer_lab.errors import RecordError
from deepinfer_lab.kernels.catalogue import PRODUCTS
from deepinfer_lab.kernels.dispatch import FALLBACK, SCHEMA_VERSION, Row, choose, validate
from deepinfer_lab.lab import project
from deepinfer_lab.lab.kernel_cells import summary
from deepinfer_lab.lab.kernel_timing import GRAPH_COLD
from deepinfer_lab.lab.record import Record, write_atomically

TIE = 0.03  # times closer than this are noise: the kernel in use stays


def sweep(record: Record) -> pd.DataFrame:
    """The cold times of the record's sweep over M, one row each with its median `us`. Incorrect results are left out.

    Raises:
        RecordError: not a complete `tiled_gemm` record.
    """
    if record.experiment != "tiled_gemm" or record.status not in ("OK", "INCORRECT"):
        raise RecordError(f"{record.experiment}, status {record.status}: a dispatch table needs a complete tiled_gemm")
    rows = summary(record.frame())
    shapes = {tuple(shape) for shape in record.params["sweep_shapes"]}
    swept = np.array([shape in shapes for shape in zip(rows["n"], rows["k"], strict=True)])
    return rows[swept & rows["correct"] & (rows["method"] == GRAPH_COLD) & rows["m"].isin(record.params["sweep_m"])]


def derive_dispatch(record: Record) -> tuple[Row, ...]:
    """The fastest kernel for few-bit weights by M: geometric mean over the sweep's shapes, cold.

    Between two measured M the winner of the larger one is taken: more rows never cost less, so its time there is a bound, and
    the other's has none. Of kernels within 3% of the fastest, the one in use at the M before stays; at the first M, the
    article's choice. The last range has no upper end.

    Raises:
        RecordError: as `sweep`; M = 1 was not measured; or an M for which no kernel has a correct result on every shape.
    """
    rows = sweep(record)
    known = rows[rows["kernel"].isin([*PRODUCTS, FALLBACK])].assign(log_us=np.log(rows["us"]))
    if known.empty:
        raise RecordError("the sweep holds no correct row of a few-bit kernel")
    shapes = len(record.params["sweep_shapes"])
    table: list[Row] = []
    for bits, of_bits in known.groupby("bits", sort=False):
        if of_bits["m"].min() != 1:
            raise RecordError(f"the sweep of {bits} bits begins at M = {of_bits['m'].min()}; a table begins at M = 1")
        ranges: list[Row] = []
        for m, of_m in of_bits.groupby("m"):
            by_kernel = of_m.groupby("kernel", sort=False)["log_us"].agg(["mean", "count"])
            times = by_kernel.loc[by_kernel["count"] == shapes, "mean"]
            if times.empty:
                raise RecordError(f"{bits} bits, M = {m}: no kernel has a correct result on all {shapes} shapes")
            close = times[times <= times.min() + np.log1p(TIE)].index
            kept = ranges[-1].kernel if ranges else choose(int(bits), int(m))
            kernel = kept if kept in close else times.idxmin()
            if ranges and ranges[-1].kernel == kernel:
                ranges[-1] = Row(int(bits), ranges[-1].m_min, int(m), kernel)
            else:
                begin = ranges[-1].m_max + 1 if ranges else 1
                ranges.append(Row(int(bits), begin, int(m), kernel))
        last = ranges.pop()
        table += [*ranges, Row(last.bits, last.m_min, None, last.kernel)]
    validate(table, f"dispatch table of {record.provenance['device_slug']}")
    return tuple(table)


def document(record: Record) -> dict[str, Any]:
    """The table as `kernels.dispatch.load` reads it, with the measurement that it came from."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": [
            {"bits": row.bits, "m_min": row.m_min, "m_max": row.m_max, "kernel": row.kernel}
            for row in derive_dispatch(record)
        ],
        "device": record.provenance["device"],
        "experiment": record.experiment,
        "measured": record.provenance["utc"],
    }


def write_dispatch(record: Record) -> Path:
    """Write `data/<device slug>/dispatch.json`.

    Raises:
        RecordError: as `derive_dispatch`.
    """
    path = project.data() / record.provenance["device_slug"] / "dispatch.json"
    write_atomically(path, json.dumps(document(record), indent=2) + "\n")
    return path
