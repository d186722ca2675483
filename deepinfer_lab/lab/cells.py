"""A record's rows as cells: what tells them apart, and the numbers that were measured there.

A column is one of four things. Names in the sets below are declared; for all others a rule decides.
- number: measured. A list of floats; a float; a count or a size (`errors`, `step_bytes`, `decode_steps`).
- word: an outcome that is no number, such as a generated text; any other list. Compared for being the same.
- nothing: names of single requests, facts of the machine, what was calculated rather than measured, points in time.
- setting: everything else, and whatever the experiment has a parameter for. Settings tell rows apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from deepinfer_lab.lab.record import Record

Kind = Literal["setting", "number", "word", "nothing"]
Settings = tuple[tuple[str, Any], ...]  # column and value, in the order of columns

SETTINGS = frozenset({"itl_target_ms", "part", "cv"})
NUMBERS = frozenset({"errors", "same_beginning_tokens", "kv_mib", "kv_pool_tokens"})
WORDS = frozenset({"text", "continuation", "sample", "reached", "reason", "error", "correct"})
NOTHING = frozenset({"request", "requests", "device", "threads", "floor_us", "reader_times_ms"})


@dataclass(frozen=True)
class Cell:
    """Rows that agree in every setting: repeats, pooled.

    Attributes:
        numbers: column -> every value that a row holds, lists joined. words: column -> the different ones, sorted.
    """

    numbers: Mapping[str, tuple[float, ...]]
    words: Mapping[str, tuple[str, ...]]


def kinds(a: Record, b: Record) -> dict[str, Kind]:
    """What each column is, judged by both records together."""
    values: dict[str, list[Any]] = defaultdict(list)
    for record in (a, b):
        for row in record.samples:
            for name, value in _measured(row).items():
                values[name].append(value)
    params = set(a.params) | set(b.params)
    return {name: _kind(name, values[name], params) for name in sorted(values)}


def keys(a: Record, b: Record, columns: Mapping[str, Kind]) -> list[str]:
    """The settings to match rows by. One that a single record has, the same in all its rows, tells nothing apart."""

    def tells_apart(name: str) -> bool:
        known = [{row.get(name) for row in r.samples} for r in (a, b) if any(name in row for row in r.samples)]
        return len(known) == 2 or len(known[0]) > 1

    return [name for name, kind in columns.items() if kind == "setting" and tells_apart(name)]


def cells(record: Record, columns: Mapping[str, Kind], by: Sequence[str]) -> dict[Settings, Cell]:
    """The record's rows, pooled where all of `by` agree (a missing setting is None)."""
    rows: dict[Settings, list[dict[str, Any]]] = defaultdict(list)
    for row in record.samples:
        rows[tuple((name, row.get(name)) for name in by)].append(_measured(row))
    return {settings: _pooled(pool, columns) for settings, pool in rows.items()}


def _pooled(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Kind]) -> Cell:
    numbers: dict[str, list[float]] = defaultdict(list)
    words: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for name, value in row.items():
            if columns[name] == "number":
                numbers[name] += [x for x in (value if isinstance(value, list) else [value]) if x is not None]
            elif columns[name] == "word":
                words[name].add(str(value))
    return Cell(
        {name: tuple(values) for name, values in numbers.items() if values},
        {name: tuple(sorted(values)) for name, values in words.items()},
    )


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with points in time turned into how long things took, in milliseconds."""
    result = {name: value for name, value in row.items() if name not in ("sent_s", "token_times_s")}
    if times := row.get("token_times_s"):
        result["itl_ms"] = (np.diff(times) * 1e3).tolist()
        if row.get("sent_s") is not None:
            result["ttft_ms"] = (times[0] - row["sent_s"]) * 1e3
    for unit, milliseconds in (("s", 1e3), ("ms", 1.0)):
        started, finished = result.pop(f"started_{unit}", None), result.pop(f"finished_{unit}", None)
        if started is not None and finished is not None:
            result["step_ms"] = (finished - started) * milliseconds
    return result


def _kind(name: str, values: Sequence[Any], params: set[str]) -> Kind:
    for kind, names in (("setting", SETTINGS), ("number", NUMBERS), ("word", WORDS), ("nothing", NOTHING)):
        if name in names:
            return kind
    if any(isinstance(value, list) for value in values):
        items = [item for value in values if isinstance(value, list) for item in value if item is not None]
        return "number" if _are_measured(items) else "word"
    if name in params:
        return "setting"
    sized = any(part.startswith("bytes") or part == "steps" for part in name.split("_"))
    given = [value for value in values if value is not None]
    return "number" if _are_measured(given) or (sized and _are_numbers(given)) else "setting"


def _are_measured(values: Sequence[Any]) -> bool:
    """Numbers, with a float among them: what is set is nearly always whole, what is measured hardly ever."""
    return _are_numbers(values) and any(isinstance(value, float) for value in values)


def _are_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
