"""Two sets of records side by side: per setting and metric, how many times A's number is B's."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deepinfer_lab.errors import RecordError, SettingError
from deepinfer_lab.lab import project
from deepinfer_lab.lab.cells import Cell, Settings, cells, keys, kinds
from deepinfer_lab.lab.differences import differences
from deepinfer_lab.lab.kernel_timing import ARTICLE
from deepinfer_lab.lab.record import Record, load
from deepinfer_lab.metrics.bootstrap import MEAN, MEDIAN, P99, Statistic, ratio_interval

TOLERANCE = 0.03
SEED = 0  # each line draws from a generator of its own, so that it depends on no other line
TAIL_FROM = 100  # gaps between tokens, from which on their 99th percentile is compared too


@dataclass(frozen=True)
class Line:
    """One metric in one setting.

    Attributes:
        settings: of its rows, all of them. parts: the metric and those settings that tell it from its neighbours, such as
            ("time_us", "kernel=w4_gemv", "m=1").
        statistic: what `a` and `b` are of the samples: "median", "p99", "mean".
        samples_a, samples_b: how many.
        ratio: b / a; None where that means nothing, as one of them is not positive (two zeros are equal: 1).
        low, high: the ratio's interval; None where there are too few samples.
        flagged: the interval lies outside of 1 by more than the tolerance.
    """

    experiment: str
    settings: dict[str, Any]
    parts: tuple[str, ...]
    metric: str
    statistic: str
    a: float
    b: float
    samples_a: int
    samples_b: int
    ratio: float | None
    low: float | None
    high: float | None
    flagged: bool

    @property
    def distance(self) -> float:
        """How far the ratio is from 1, alike in both directions; infinite without a ratio."""
        return math.inf if self.ratio is None else abs(math.log(self.ratio))

    @property
    def label(self) -> str:
        return " ".join(self.parts)


@dataclass(frozen=True)
class Pair:
    """One experiment that both sides have.

    Attributes:
        matched_by: the columns that rows are matched by.
        notes: what is not the same about the two besides their numbers, and what found no counterpart.
        lines: the farthest from 1 first.
    """

    experiment: str
    a: Record
    b: Record
    matched_by: list[str]
    notes: list[str]
    lines: list[Line]


def find(name: str) -> dict[str, Record]:
    """The records that `name` means, by experiment: a device's folder of `data/`, or a path to a folder or to one record.

    A relative path is looked for in the working folder, then in the project's. Files without `samples` are no records.

    Raises:
        RecordError: nothing of that name, a folder without records or with two of one experiment, or a malformed record.
    """
    candidates = [project.data() / name, Path(name), project.root() / name] if name else []
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        known = ", ".join(sorted({p.parent.name for p in project.data().glob("*/*.json") if is_record(p)})) or "none"
        raise RecordError(f"'{name}' is no device, folder or record; devices in {project.data()}: {known}")
    if path.is_file():
        record = load(path)
        return {record.experiment: record}
    files = sorted(path.glob("*.json"))
    records: dict[str, Record] = {}
    for file in filter(is_record, files):
        record = load(file)
        if record.experiment in records:
            raise RecordError(f"{file}: a second record of {record.experiment} in one folder")
        records[record.experiment] = record
    if not records:
        raise RecordError(f"{path}: holds no record; there is {', '.join(f.name for f in files) or 'no .json file'}")
    return records


def is_record(path: Path) -> bool:
    """Whether a .json file claims to be a record. Tables and reports lie beside records, and have no samples."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return True  # for `load` to complain about
    return isinstance(content, dict) and "samples" in content


def compare(
    a: Mapping[str, Record],
    b: Mapping[str, Record],
    experiments: Sequence[str] = (),
    tolerance: float = TOLERANCE,
) -> list[Pair]:
    """Compare every experiment that both have, or those named.

    Args:
        a, b: as `find` returns them.
        experiments: names; none for all.
        tolerance: a share of 1, beyond which an interval must lie to be flagged.

    Raises:
        RecordError: no experiment in common, or a named one that a side lacks.
        SettingError: a tolerance that is not at least 0.
    """
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise SettingError(f"tolerance {tolerance}: allowed are numbers from 0 on, such as {TOLERANCE}")
    for side, records in (("A", a), ("B", b)):
        if missing := [name for name in experiments if name not in records]:
            raise RecordError(f"{side} has no record of {', '.join(missing)}; it has {', '.join(sorted(records))}")
    common = [name for name in sorted(a) if name in b and (not experiments or name in experiments)]
    if not common:
        raise RecordError(f"no experiment in common: A has {', '.join(sorted(a))}; B has {', '.join(sorted(b))}")
    return [_pair(a[name], b[name], tolerance) for name in common]


def ranked(pairs: Sequence[Pair]) -> list[Line]:
    """All lines, the farthest from 1 first; those without a ratio before all others."""
    return sorted((line for pair in pairs for line in pair.lines), key=lambda line: -line.distance)


def forest(pairs: Sequence[Pair], most: int = 30) -> pd.DataFrame:
    """The most different lines that have a ratio, as `figures.comparison.draw_forest` takes them."""
    lines = [line for line in ranked(pairs) if line.ratio is not None][:most]
    rows = []
    for line in lines:
        alike = [set(other.parts) for other in lines if other.experiment == line.experiment]
        common = set.intersection(*alike) if len(alike) > 1 else set()
        rows.append(
            {
                "experiment": line.experiment,
                "common": " ".join(part for part in line.parts if part in common),
                "label": " ".join(part for part in line.parts if part not in common),
                "ratio": line.ratio, "low": line.low, "high": line.high, "flagged": line.flagged,
            }
        )  # fmt: skip
    columns = ["experiment", "common", "label", "ratio", "low", "high", "flagged"]
    return pd.DataFrame(rows, columns=columns).astype({"ratio": float, "low": float, "high": float})


def _pair(a: Record, b: Record, tolerance: float) -> Pair:
    columns = kinds(a, b)
    by = keys(a, b, columns)
    cells_a, cells_b = cells(a, columns, by), cells(b, columns, by)
    matched = {settings: (cells_a[settings], cells_b[settings]) for settings in cells_a if settings in cells_b}
    notes = list(differences(a, b, columns, by, cells_a, cells_b))
    parts = _parts(list(matched))
    lines = [
        _line(a.experiment, dict(settings), parts[settings], metric, statistic, values, tolerance)
        for settings, pair in matched.items()
        for metric, statistic, values in _metrics(dict(settings), *pair)
    ]
    return Pair(a.experiment, a, b, by, notes, sorted(lines, key=lambda line: -line.distance))


def _parts(matched: Sequence[Settings]) -> dict[Settings, tuple[str, ...]]:
    """Each one's settings without those that all rows of its kind (their column `row`) agree in."""
    families: dict[Any, list[Settings]] = defaultdict(list)
    for settings in matched:
        families[dict(settings).get("row")].append(settings)
    parts = {}
    for family, alike in families.items():
        varying = [at for at in range(len(alike[0])) if len({settings[at] for settings in alike}) > 1]
        first = () if family is None else (str(family),)
        for settings in alike:
            shown = [settings[at] for at in varying if settings[at][1] is not None]
            parts[settings] = (*first, *(f"{name}={value}" for name, value in shown))
    return parts


def _metrics(
    settings: Mapping[str, Any], a: Cell, b: Cell
) -> Iterator[tuple[str, Statistic, tuple[Sequence[float], Sequence[float]]]]:
    """What both cells measured: the metric, what stands for its samples, and the samples of A and of B."""
    usual = MEAN if settings.get("method") == ARTICLE else MEDIAN  # that method's figure is a mean
    for metric in sorted(set(a.numbers) & set(b.numbers)):
        values = a.numbers[metric], b.numbers[metric]
        tail = metric.endswith("itl_ms") and min(map(len, values)) >= TAIL_FROM
        for statistic in (usual, P99) if tail else (usual,):
            yield metric, statistic, values


def _line(
    experiment: str,
    settings: dict[str, Any],
    parts: tuple[str, ...],
    metric: str,
    statistic: Statistic,
    values: tuple[Sequence[float], Sequence[float]],
    tolerance: float,
) -> Line:
    of_a, of_b = values
    a, b = statistic.of(of_a), statistic.of(of_b)
    ratio = b / a if min(a, b) > 0 else 1.0 if a == b else None
    low, high = ratio_interval(of_a, of_b, statistic, np.random.default_rng(SEED)) or (None, None)
    flagged = low is not None and high is not None and (low > 1 + tolerance or high < 1 / (1 + tolerance))
    what = (metric, P99.name) if statistic is P99 else (metric,)
    return Line(
        experiment, settings, (*what, *parts), metric, statistic.name, a, b, len(of_a), len(of_b),
        ratio, low, high, flagged,
    )  # fmt: skip
