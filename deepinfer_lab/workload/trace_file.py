"""Arrivals and lengths of real requests, from a CSV file: our own columns, Azure's or BurstGPT's.

Azure LLM inference traces 2023 and 2024: https://github.com/Azure/AzurePublicDataset (Patel et al. 2024, Splitwise;
Stojkovic et al. 2025, DynamoLLM). BurstGPT: https://github.com/HPMLL/BurstGPT (Wang et al. 2024).
"""

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from deepinfer_lab.errors import SettingError
from deepinfer_lab.progress import bar


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: when it came, in seconds since the first one, and how long it was."""

    at_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """A trace that can be replayed.

    Attributes:
        arrivals: by time; the first at 0.
        skipped: rows left out because they have no input or no output tokens. BurstGPT marks failed requests so.
    """

    arrivals: tuple[Arrival, ...]
    skipped: int


def read_trace(path: str | Path, *, limit: int | None = None, speed_up: float = 1.0) -> Trace:
    """Read a trace with a header that names, besides any others, the columns of one of these formats.

    - ours: `timestamp` in seconds, `input_tokens`, `output_tokens`
    - Azure: `TIMESTAMP`, a date and time (UTC where it names no zone), `ContextTokens`, `GeneratedTokens`
    - BurstGPT: `Timestamp` in seconds, `Request tokens`, `Response tokens`

    Args:
        path: the file, UTF-8.
        limit: read the first so many requests of the file, and nothing behind them; None reads all.
        speed_up: times are divided by it, so 2 doubles the rate.

    Raises:
        SettingError: an option outside its range; a file that cannot be read, or holds no request or another format.
    """
    if limit is not None and limit < 1:
        raise SettingError(f"limit {limit}: allowed is 1 or more, or None for all requests")
    if not 0 < speed_up < math.inf:
        raise SettingError(f"speed_up {speed_up}: allowed is above 0, and finite")
    path = Path(path)
    arrivals, skipped = [], 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # -sig: spreadsheets begin with a byte order mark
            for arrival in _rows(path, file):
                if arrival.input_tokens == 0 or arrival.output_tokens == 0:
                    skipped += 1
                    continue
                arrivals.append(arrival)
                if len(arrivals) == limit:
                    break
    except OSError as error:
        raise SettingError(f"{path}: cannot be read ({error.strerror}), expected a CSV file") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"{path}: not UTF-8 ({error.reason}), expected a CSV file") from error
    if not arrivals:
        raise SettingError(
            f"{path}: no request, and {skipped} rows without input or output tokens; needed is 1 or more"
        )
    arrivals.sort(key=attrgetter("at_s"))
    start = arrivals[0].at_s
    return Trace(
        tuple(Arrival((each.at_s - start) / speed_up, each.input_tokens, each.output_tokens) for each in arrivals),
        skipped,
    )


def _rows(path: Path, file: TextIO) -> Iterator[Arrival]:
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, [])
        fields = _fields_of(path, header)
        for row in bar(reader, desc=f"reading {path.name}", unit="row"):
            if not row:
                continue  # an empty line
            where = f"{path}, line {reader.line_num}"
            if len(row) != len(header):
                raise SettingError(f"{where}: {len(row)} fields, expected {len(header)}, as many as in the header")
            yield Arrival(*(field.value(where, row[header.index(field.column)]) for field in fields))
    except csv.Error as error:
        raise SettingError(f"{path}, line {reader.line_num}: {error}; expected CSV") from error


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _moment(text: str) -> float:
    """In seconds since 1970. Azure writes tenths of microseconds; a `datetime` drops the last digit."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError
    return count


@dataclass(frozen=True)
class _Field:
    """A column and what stands in it. `parse` raises ValueError for anything else."""

    column: str
    parse: Callable[[str], Any]
    expected: str

    def value(self, where: str, text: str) -> Any:
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(f"{where}, column '{self.column}': {text!r}, expected {self.expected}") from error


def _fields(time: str, parse: Callable[[str], float], expected: str, *tokens: str) -> tuple[_Field, ...]:
    return (_Field(time, parse, expected), *(_Field(name, _tokens, "an integer of 0 or more") for name in tokens))


_FORMATS = (
    _fields("timestamp", _seconds, "a number of seconds", "input_tokens", "output_tokens"),
    _fields("TIMESTAMP", _moment, "a date and time", "ContextTokens", "GeneratedTokens"),
    _fields("Timestamp", _seconds, "a number of seconds", "Request tokens", "Response tokens"),
)


def _fields_of(path: Path, header: list[str]) -> tuple[_Field, ...]:
    """The format whose columns the header has."""
    for fields in _FORMATS:
        if all(field.column in header for field in fields):
            return fields
    known = "; ".join(", ".join(field.column for field in fields) for fields in _FORMATS)
    raise SettingError(f"{path}, line 1: the columns are {', '.join(header) or 'none'}; allowed are {known}")
