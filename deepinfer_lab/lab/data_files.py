"""The files of `data/<device>/`: whose they are, and whether the CUDA sources behind them are those of this package."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_lab.errors import RecordError
from deepinfer_lab.kernels.catalogue import PRODUCTS, TILED, DequantiseProduct
from deepinfer_lab.lab import project, provenance

INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class DataFile:
    """One file of `data/<device>/`: a record, or a table or report that lies beside records.

    Attributes:
        rows: how many samples, results or rows; None where it has none.
        kernels: "current", "changed since", "none" or "none ran", see `kernel_state`. changed: those that are not the same
            any more.
        provenance: as the file has it; empty where it has none.
    """

    name: str
    path: Path
    device: str
    driver: str | None
    utc: str
    commit: str
    status: str
    rows: int | None
    kernels: str
    changed: list[str]
    provenance: Mapping[str, Any]


def data_paths() -> list[Path]:
    """Every .json file of `data/<device>/`, but for published numbers, by device and name."""
    return [path for path in sorted(project.data().glob("*/*.json")) if path.parent.name != "published"]


def data_files() -> list[DataFile]:
    """What `data_paths` finds, read.

    Raises:
        RecordError: a file that is not a JSON object.
    """
    return [read(path) for path in data_paths()]


def content(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        RecordError: it holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path}: must be a JSON object, not {type(found).__name__}")
    return found


def read(path: Path) -> DataFile:
    """What one file is. For errors see `content`."""
    found = content(path)
    origin = found.get("provenance", {})
    parts = [found.get(name) for name in ("samples", "results", "rows", "tests")]
    rows = next((part for part in parts if isinstance(part, list | dict)), None)
    named = {row.get("kernel") for row in found.get("samples", [])}
    if origin and origin.get("driver") is None:
        state, changed = "none ran", []  # on a CPU
    else:
        recorded = found.get("kernels", origin.get("kernels"))
        state, changed = kernel_state(recorded, provenance.kernel_hashes(), named)
    commit = str(origin.get("commit") or "-")[:12]
    return DataFile(
        path.stem, path,
        origin.get("device", found.get("device", path.parent.name)), origin.get("driver"),
        origin.get("utc", found.get("measured", "-")), commit + (" + local changes" if origin.get("dirty") else ""),
        found.get("status", "-"), None if rows is None else len(rows), state, changed, origin,
    )  # fmt: skip


def kernel_state(
    recorded: Mapping[str, str] | None, now: Mapping[str, str], named: Iterable[str | None] = ()
) -> tuple[str, list[str]]:
    """Whether the CUDA sources behind a record are those of this package.

    Args:
        recorded: file name -> SHA-256, of every source that was there. now: the same of this package.
        named: the kernels that the record's rows name, None for a row without one. Where each row names one, only
            these kernels' sources and what they include are compared; otherwise all, since any of them may have run.

    Returns:
        "current"; or "changed since" with the files that differ or are gone; or "none", where it names none. Files that
        came later change nothing.
    """
    if not recorded:
        return "none", []
    named = set(named)
    sources = set().union(*(_sources(name, recorded) for name in named - {None}))
    used = _with_includes(sources) if named and None not in named else set(recorded)
    changed = sorted(name for name in used & set(recorded) if now.get(name) != recorded[name])
    return ("changed since" if changed else "current"), changed


def _sources(kernel: str, recorded: Iterable[str]) -> set[str]:
    """The files that a kernel is compiled from; of one in torch or cuBLAS, a name that no source has.

    Launchers of weights in tiles choose among several by M and card: of those with so many bits all count.
    """
    if kernel in TILED:
        wide = kernel.endswith("_wide")
        kind, first = ("_wide_", {"arrange_rows.cu"}) if wide else ("_mma_", set())
        return first | {name for name in recorded if name.startswith(f"w{TILED[kernel].bits}_") and kind in name}
    product = PRODUCTS.get(kernel)
    return {f"w{product.bits}_dequantise.cu" if isinstance(product, DequantiseProduct) else f"{kernel}.cu"}


def _with_includes(files: set[str]) -> set[str]:
    """The files and all that they include. As they are now: one that included others before has changed itself."""
    found: set[str] = set()
    left = set(files)
    while left:
        name = left.pop()
        found.add(name)
        path = provenance.KERNELS / name
        if path.is_file():
            left |= set(INCLUDE.findall(path.read_text(encoding="utf-8"))) - found
    return found
