"""One experiment's raw samples and where they came from, as plain JSON."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from deepinfer_lab.errors import RecordError

SCHEMA_VERSION = 1
WHOLE = ("OK", "INCORRECT")  # statuses of a record that has all rows
STATUSES = (*WHOLE, "OOM", "TIMEOUT")
PROVENANCE_KEYS = ("device", "device_slug", "utc")  # the least a reader needs to know whose numbers these are


@dataclass(frozen=True)
class Record:
    """What came of one run of one experiment.

    Attributes:
        experiment: the experiment's name, which is also the file's.
        params: every parameter that it ran with, JSON values.
        provenance: what ran it; see `provenance.collect`. Holds at least `PROVENANCE_KEYS`.
        status: "OK", "INCORRECT" (a row says `correct: false`), or "OOM" or "TIMEOUT" (the samples are what finished
            before).
        samples: tidy rows with raw timings, units in the key names. A value is a scalar or a flat list of scalars.
        schema_version: of this layout.
    """

    experiment: str
    params: dict[str, Any]
    provenance: dict[str, Any]
    status: str
    samples: list[dict[str, Any]]
    schema_version: int = SCHEMA_VERSION

    @property
    def whole(self) -> bool:
        """It has all rows: neither memory nor time ran out."""
        return self.status in WHOLE

    def frame(self) -> pd.DataFrame:
        """The samples, one row each."""
        return pd.DataFrame(self.samples)

    def save(self, path: Path) -> None:
        """Write the record to `path`: sorted keys, one sample a line, whole or not at all.

        Raises:
            RecordError: a field that `load` would refuse.
        """
        content = asdict(self)
        validate(content, str(path))
        write_atomically(path, _to_json(content))


def load(path: Path) -> Record:
    """Read and check a record.

    Raises:
        RecordError: no such file, not JSON, or a field that is missing, unknown or malformed; names file and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path}: no such record") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 text: {error}") from None
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise RecordError(f"{path}: not plain JSON: {error}") from None
    validate(content, str(path))
    return Record(**content)


def validate(content: Any, origin: str) -> None:
    """Check every field of a record.

    Args:
        content: the decoded JSON.
        origin: the file's name, for the message.

    Raises:
        RecordError: naming `origin`, the field, its value and what is allowed.
    """
    if not isinstance(content, Mapping):
        raise RecordError(f"{origin}: a record must be a JSON object, not {type(content).__name__}")
    known = {field.name for field in fields(Record)}
    for problem, names in (("missing", known - set(content)), ("unknown", set(content) - known)):
        if names:
            raise RecordError(
                f"{origin}: {problem} field(s) {', '.join(sorted(names))}; allowed: {', '.join(sorted(known))}"
            )
    version = content["schema_version"]
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        raise RecordError(f"{origin}: schema_version is {version!r}, but this version reads only {SCHEMA_VERSION}")
    if not isinstance(content["experiment"], str) or not content["experiment"]:
        raise RecordError(f"{origin}: experiment must be a non-empty string, not {content['experiment']!r}")
    if content["status"] not in STATUSES:
        raise RecordError(f"{origin}: status is {content['status']!r}, not one of {', '.join(STATUSES)}")
    for name in ("params", "provenance"):
        if not isinstance(content[name], dict):
            raise RecordError(f"{origin}: {name} must be a JSON object, not {type(content[name]).__name__}")
        _check_value(content[name], f"{origin}: {name}")
    for key in PROVENANCE_KEYS:
        value = content["provenance"].get(key)
        if not isinstance(value, str) or not value:
            raise RecordError(f"{origin}: provenance.{key} must be a non-empty string, not {value!r}")
    if not isinstance(content["samples"], list):
        raise RecordError(f"{origin}: samples must be a list of rows, not {type(content['samples']).__name__}")
    for number, row in enumerate(content["samples"]):
        check_row(row, f"{origin}: samples[{number}]")


def check_row(row: Any, origin: str) -> None:
    """Check one sample: a non-empty object of scalars, or of flat lists of scalars.

    Raises:
        RecordError: naming `origin` and the key.
    """
    if not isinstance(row, dict) or not row:
        raise RecordError(f"{origin}: a row must be a non-empty object, not {row!r}")
    for key, value in row.items():
        if isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
        ):
            raise RecordError(f"{origin}.{key}: a tidy row holds scalars or flat lists of scalars, not {value!r}")
    _check_value(row, origin)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` (UTF-8, line feeds) so that `path` is never seen half-written. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        temporary.chmod(0o644)  # mkstemp makes it private, but records are shared
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def partial_rows(path: Path, begun: Record) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Keep rows as they come, a JSON line each, after a line with the record that they are meant for.

    Yields:
        What to call with each row. A row is in the file when the call returns, even if the process is killed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as stream:

        def keep(row: Mapping[str, Any]) -> None:
            stream.write(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n")
            stream.flush()

        keep({name: value for name, value in asdict(begun).items() if name not in ("samples", "status")})
        yield keep


def _to_json(content: dict[str, Any]) -> str:
    """Indented JSON, but one sample a line: a diff then shows which rows changed."""
    parts = []
    for name in sorted(content):
        value = content[name]
        if name == "samples" and value:
            rows = ",\n".join("    " + json.dumps(row, sort_keys=True, ensure_ascii=False) for row in value)
            body = f"[\n{rows}\n  ]"
        else:
            body = json.dumps(value, sort_keys=True, ensure_ascii=False, indent=2).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(name)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _check_value(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not key:
                raise RecordError(f"{where}: a key must be a non-empty string, not {key!r}")
            _check_value(item, f"{where}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_value(item, f"{where}[{number}]")
    elif type(value) is float:
        if not isfinite(value):
            raise RecordError(f"{where} is {value!r}: JSON has finite numbers only; use null for what was not measured")
    elif value is not None and type(value) not in (str, int, bool):  # not isinstance: numpy scalars would pass
        raise RecordError(f"{where} is {value!r} of type {type(value).__name__}; plain JSON values only")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeated key(s) {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    return result
