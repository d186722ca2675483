"""Which kernel for which shape on the card at hand: every candidate is timed, and the fastest go into a dispatch table."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from deepinfer_lab.errors import KernelError, RecordError
from deepinfer_lab.kernels.dispatch import FALLBACK, SCHEMA_VERSION, Row, exists, read, validate
from deepinfer_lab.lab.kernel_cells import MAX_ERROR, Case, kernels_for, launcher, random_case, random_matrix
from deepinfer_lab.lab.kernel_dispatch import general_rows, shape_rows
from deepinfer_lab.lab.kernel_timing import MIN_REPLAYS, Gpu, graph_cold
from deepinfer_lab.lab.record import write_atomically
from deepinfer_lab.progress import bar

M_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
HOPELESS = 4.0  # times the fastest


@dataclass(frozen=True)
class Timing:
    """What a kernel takes for one product, cold.

    Attributes:
        us: the median, in microseconds; None where `fault` says why the kernel was not timed.
        floor_us: the least that memory allows. rel_err: against float32; None where there is no finite result.
    """

    bits: int
    m: int
    n: int
    k: int
    group: int
    kernel: str
    us: float | None
    floor_us: float
    rel_err: float | None
    fault: str | None


def timings(
    gpu: Gpu,
    shapes: Sequence[tuple[int, int]],
    bits: Sequence[int],
    every_m: Sequence[int] = M_BUCKETS,
    group: int = 128,
    replays: int = MIN_REPLAYS,
    seed: int = 0,
) -> Iterator[Timing]:
    """Check and time every kernel that takes the product, by `graph_cold`; not a wrong one, nor the article's fallback.

    A kernel is given up for the larger M of a shape where it takes four times as long as the fastest and its time has begun to
    grow, at least with the square root of M. Slow alone is no reason: to make a weight dense costs the same for any M, too much
    for one row and next to nothing for a thousand.

    Args:
        shapes: (N, K) of the weights.

    Raises:
        QuantisationError: a K that the group does not divide.
    """
    random = torch.Generator(gpu.device).manual_seed(seed)
    bandwidth = gpu.read_bandwidth()
    weights = [(n, k, its) for n, k in shapes for its in bits]
    with bar(total=len(weights) * len(every_m), desc="tuning", unit="product") as progress:
        for n, k, its in weights:
            matrix = random_matrix(gpu, random, its, n, k, group)
            given_up: set[str] = set()
            before: dict[str, Timing] = {}
            for m in sorted(every_m):
                case = random_case(gpu, random, matrix, m)
                kernels = [kernel for kernel in kernels_for(its, m, gpu.device) if kernel not in given_up]
                kernels.remove(
                    FALLBACK
                )  # a minute of a tuning: `dequantise_cublas` does the same for any M, and faster
                found = [_timing(gpu, case, kernel, bandwidth, replays) for kernel in kernels]
                yield from found
                timed = {timing.kernel: timing for timing in found if timing.us is not None}
                best = min((timing.us for timing in timed.values()), default=0.0)
                given_up |= {name for name, timing in timed.items() if _is_hopeless(timing, before.get(name), best)}
                before = timed
                progress.update(1)


def _timing(gpu: Gpu, case: Case, kernel: str, bandwidth: float, replays: int) -> Timing:
    us, error, fault = None, math.nan, None
    try:
        launch = launcher(kernel, case)
        error = case.error(launch)
        if error < MAX_ERROR:  # NaN is not
            us = float(np.median(graph_cold(gpu, launch, len(case.matrix.copies), replays)))
        else:
            fault = f"wrong: relative error {error:.1e}, allowed is {MAX_ERROR:.0e}"
    except KernelError as refusal:  # a shape that the kernel does not take
        fault = str(refusal)
    rel_err = error if math.isfinite(error) else None
    return Timing(**case.columns(bandwidth), kernel=kernel, us=us, rel_err=rel_err, fault=fault)


def _is_hopeless(timing: Timing, before: Timing | None, best: float) -> bool:
    if before is None or timing.us <= HOPELESS * best:
        return False
    return timing.us >= before.us * math.sqrt(timing.m / before.m)


def table_from(found: Sequence[Timing], base: Sequence[Row] = ()) -> tuple[Row, ...]:
    """A dispatch table: rows for each shape that was timed, and general ones; what `base` says of other shapes and bits stays.

    The general rows of an existing table stay too where a single shape was timed, which says little about others.

    Raises:
        RecordError: as `general_rows`.
    """
    rows = [asdict(timing) for timing in found if timing.us is not None]
    times = pd.DataFrame(rows, columns=[field.name for field in fields(Timing)])
    general, own = general_rows(times), shape_rows(times)
    timed = {(row.bits, row.n, row.k) for row in own}
    shapes = Counter(bits for bits, _, _ in timed)
    stay = {row.bits for row in base if row.n is None and shapes[row.bits] < 2}
    table = (
        *(row for row in general if row.bits not in stay),
        *(row for row in base if row.n is None and row.bits in stay),
        *own,
        *(row for row in base if row.n is not None and (row.bits, row.n, row.k) not in timed),
    )
    validate(table, "the tuned table")
    return table


def read_base(path: Path, device: str) -> tuple[Row, ...]:
    """The table that a new one is merged into; empty where there is no such file.

    Rows for bits of which it names a kernel that there is no more are left out: the others have gaps where that kernel was.

    Raises:
        KernelError: it is no dispatch table.
        RecordError: it is another device's.
    """
    if not path.is_file():
        return ()
    found = read(path)
    gone = {row.bits for row in found if not exists(row.kernel)}
    rows = tuple(row for row in found if row.bits not in gone)
    if rows:
        validate(rows, str(path))
    its = json.loads(path.read_text(encoding="utf-8")).get("device")
    if its != device:
        raise RecordError(f"{path} is the table of {its!r}, and this is {device!r}: choose another --output")
    return rows


def write_table(path: Path, table: Sequence[Row], origin: dict[str, Any], experiment: str = "tune") -> None:
    """Write a dispatch.json, a row a line.

    Args:
        origin: provenance, as `provenance.collect` gives it. experiment: what timed the kernels, or a record of it.
    """
    lines = []
    for row in table:
        named = {name: value for name, value in asdict(row).items() if name not in ("n", "k") or value is not None}
        lines.append("    " + json.dumps(named))
    about = {
        "device": origin["device"],
        "experiment": experiment,
        "measured": origin["utc"],
        "commit": origin["commit"],
    }
    rest = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in about.items())
    rows = ",\n".join(lines)
    write_atomically(path, f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "rows": [\n{rows}\n  ],\n{rest}\n}}\n')
