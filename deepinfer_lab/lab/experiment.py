"""An experiment, and the one way to a record of it: read it, or measure it now."""

import gc
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepinfer_lab.errors import OutOfDeviceMemory, RecordError, SettingError
from deepinfer_lab.lab import journal, project, provenance, time_limit
from deepinfer_lab.lab import mode as modes
from deepinfer_lab.lab.record import Record, check_row, load, partial_rows, validate
from deepinfer_lab.progress import bar

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
AGAIN = "DEEPINFER_AGAIN"  # set: measure even what an earlier run has finished


@dataclass(frozen=True)
class Experiment:
    """Something that can be measured.

    Attributes:
        name: of its record's file; [a-z0-9_-].
        measure: params -> rows. Best a generator: the rows that it yielded survive an interruption. A row's
            `correct: False` makes the record INCORRECT; `TimeoutError` ends it as TIMEOUT, as the time limit does, and lack of
            memory as OOM.
        defaults: every parameter with its default, JSON values.
        runs_on_cpu: whether it makes sense without a GPU.
        description: one line, for `deepinfer-lab`'s listing.
    """

    name: str
    measure: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]
    defaults: Mapping[str, Any]
    runs_on_cpu: bool
    description: str

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise SettingError(f"experiment name {self.name!r}: lower-case letters, digits, - and _ only")


def obtain(
    experiment: Experiment, *, mode: str = "auto", device: str, params: Mapping[str, Any] | None = None
) -> Record:
    """The record of `experiment` with `params`, replayed or measured.

    Args:
        experiment: what to look up or run.
        mode: "replay", "measure" or "auto"; see `mode.resolve`.
        device: whose record to replay, a folder of `data/`. Measuring uses the machine at hand.
        params: those that differ from the experiment's defaults.

    Raises:
        SettingError: an unknown parameter or mode, or a GPU experiment measured without a GPU.
        RecordError: replay finds no record of that device, or one measured with other parameters; or the record is cut
            short, by lack of memory or time.
    """
    return _whole([_obtain(experiment, mode, device, params or {})])[0]


def obtain_all(experiments: Sequence[Experiment], *, mode: str = "auto", device: str) -> dict[str, Record]:
    """The records of several experiments with their default parameters, by name.

    One that is cut short does not keep the others from being measured. For arguments and errors see `obtain`.
    """
    return {record.experiment: record for record in _whole([_obtain(each, mode, device, {}) for each in experiments])}


def _obtain(experiment: Experiment, mode: str, device: str, params: Mapping[str, Any]) -> Record:
    asked = complete(experiment, params)
    if modes.resolve(mode, runs_on_cpu=experiment.runs_on_cpu) == "replay":
        record = replay(experiment, device, asked)
        journal.note(experiment.name, "replayed")
        return record
    return measure(experiment, asked)


def _whole(records: list[Record]) -> list[Record]:
    cut = [
        f"{each.experiment} ended as {each.status} after {len(each.samples)} rows" for each in records if not each.whole
    ]
    if cut:
        raise RecordError(f"what follows needs whole records, but {'; '.join(cut)}")
    return records


def complete(experiment: Experiment, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` over the experiment's defaults, as they will look in JSON (a tuple becomes a list).

    Raises:
        SettingError: an unknown name, or a value that JSON cannot hold.
    """
    unknown = sorted(set(params) - set(experiment.defaults))
    if unknown:
        allowed = ", ".join(sorted(experiment.defaults)) or "none"
        raise SettingError(f"experiment {experiment.name!r} has no parameter {', '.join(unknown)}; allowed: {allowed}")
    try:
        return json.loads(json.dumps({**experiment.defaults, **params}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SettingError(f"experiment {experiment.name!r}: a parameter is not a JSON value: {error}") from None


def replay(experiment: Experiment, device: str, params: Mapping[str, Any]) -> Record:
    """Read `data/<device>/<experiment>.json`.

    Raises:
        RecordError: no such record, or one that is malformed, misfiled, or measured with other parameters.
    """
    file = f"{experiment.name}.json"
    path = project.data() / device / file
    if not path.is_file():
        known = ", ".join(sorted(found.parent.name for found in project.data().glob(f"*/{file}"))) or "none yet"
        raise RecordError(
            f"no record of {experiment.name!r} from device {device!r}; devices that have one: {known}. "
            "mode=measure makes one on this machine"
        )
    record = load(path)
    found = {"experiment": record.experiment, "provenance.device_slug": record.provenance["device_slug"]}
    for field, expected in (("experiment", experiment.name), ("provenance.device_slug", device)):
        if found[field] != expected:
            raise RecordError(f"{path}: {field} is {found[field]!r}, but a record filed there must say {expected!r}")
    differing = [
        f"{name} (record: {_show(record.params, name)}, asked: {_show(params, name)})"
        for name in sorted(set(record.params) | set(params))
        if name not in record.params or name not in params or record.params[name] != params[name]
    ]
    if differing:
        raise RecordError(
            f"{path} was measured with other parameters: {', '.join(differing)}. "
            "mode=measure re-measures with those asked for"
        )
    return record


def measure(experiment: Experiment, params: Mapping[str, Any]) -> Record:
    """Run the experiment here and file its record under `build/data/<device slug>/`.

    Where a whole record of the same parameters, committed code and environment lies there already, that is the answer, unless
    `DEEPINFER_AGAIN` is set. Rows are kept as they come in `<name>.partial.jsonl`, after a line that says whose they are:
    whatever breaks the run off leaves it. The next run begins anew. `provenance.seconds` says how long it took.

    Raises:
        SettingError: it needs a GPU and there is none, or a malformed `DEEPINFER_TIME_LIMIT`.
        RecordError: it yields a row that a record cannot hold.
    """
    if not experiment.runs_on_cpu and not torch.cuda.is_available():
        raise SettingError(
            f"mode=measure: experiment {experiment.name!r} needs a CUDA GPU and there is none; "
            "mode=replay reads a record"
        )
    origin = provenance.collect()  # before the run: it speaks of the sources that are about to run
    path = project.build() / "data" / origin["device_slug"] / f"{experiment.name}.json"
    if not os.environ.get(AGAIN) and (kept := _kept(path, params, origin)):
        journal.note(experiment.name, "kept")
        return kept
    limit_s, started = time_limit.limit_s(), time.monotonic()
    partial = path.with_suffix(".partial.jsonl")
    journal.note(experiment.name, journal.BEGUN)
    try:
        result = perform(experiment, params, origin, limit_s, partial)
    except BaseException as error:
        journal.note(experiment.name, f"failed: {type(error).__name__}", time.monotonic() - started)
        raise
    result.save(path)
    partial.unlink(missing_ok=True)
    journal.note(experiment.name, result.status, result.provenance["seconds"])
    return result


def perform(
    experiment: Experiment, params: Mapping[str, Any], origin: Mapping[str, Any], limit_s: float, partial: Path | None
) -> Record:
    """Run the experiment here. Its record is filed nowhere.

    Args:
        params: all of them. origin: the record's provenance, to which `seconds` is added.
        limit_s: seconds, after which it ends as TIMEOUT.
        partial: where rows are kept as they come, and stay; a file without any row goes if the experiment fails. None: nowhere.

    Raises:
        RecordError: it yields a row that a record cannot hold.
        Exception: whatever the experiment raises, but for lack of memory or time.
    """
    begun = Record(experiment.name, dict(params), dict(origin), "OK", [])
    validate(asdict(begun), f"experiment {experiment.name!r}")  # now, not after hours of measuring
    samples: list[dict[str, Any]] = []
    status, started = "OK", time.monotonic()
    keeping = nullcontext(lambda _row: None) if partial is None else partial_rows(partial, begun)
    try:
        with time_limit.time_limit(limit_s), keeping as keep:
            for row in bar(experiment.measure(dict(params)), desc=experiment.name, unit="row"):
                plain = _plain(row)
                check_row(plain, f"experiment {experiment.name!r}: row {len(samples)}")
                samples.append(plain)
                keep(plain)
                if time.monotonic() - started > limit_s:
                    raise TimeoutError
    except TimeoutError:
        status = "TIMEOUT"
    except BaseException as error:
        if not _out_of_memory(error):
            if partial is not None and not samples:
                partial.unlink(missing_ok=True)
            raise
        status = "OOM"
    if status == "OOM":
        _free_memory()
    elif status == "OK" and any(row.get("correct") is False for row in samples):
        status = "INCORRECT"
    seconds = round(time.monotonic() - started, 1)
    return replace(begun, provenance={**origin, "seconds": seconds}, status=status, samples=samples)


def banner(record: Record) -> str:
    """Two lines that say whose numbers follow: device, driver, date, commit, status."""
    origin = record.provenance
    driver = f", driver {origin['driver']}" if origin.get("driver") else ""
    cuda = f", CUDA {origin['cuda']}" if origin.get("driver") and origin.get("cuda") else ""
    commit = str(origin.get("commit") or "unknown")[:12] + (" with local changes" if origin.get("dirty") else "")
    return (
        f"{record.experiment}: {origin['device']}{driver}{cuda}\n"
        f"measured {origin['utc']}, commit {commit}, status {record.status}, {len(record.samples)} rows"
    )


def _kept(path: Path, params: Mapping[str, Any], origin: Mapping[str, Any]) -> Record | None:
    """The record that another run would only repeat."""
    try:
        record = load(path)
    except RecordError:
        return None
    same = record.params == params and provenance.repeats(record.provenance, origin)
    return record if same and record.whole else None


def _out_of_memory(error: BaseException) -> bool:
    """Of the device or the host, as torch, CuPy (a MemoryError), the engine and the CUDA runtime report it."""
    if isinstance(error, torch.cuda.OutOfMemoryError | OutOfDeviceMemory | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def _free_memory() -> None:
    """What a failed experiment held, so that the next one can have it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _show(params: Mapping[str, Any], name: str) -> str:
    return json.dumps(params[name], sort_keys=True) if name in params else "absent"


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with numpy and zero-dimensional torch scalars as Python numbers."""
    return {key: value.item() if getattr(value, "ndim", None) == 0 else value for key, value in dict(row).items()}
