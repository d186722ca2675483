import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_lab.errors import OutOfDeviceMemory, RecordError, SettingError
from deepinfer_lab.lab import experiment as experiment_module
from deepinfer_lab.lab import journal, provenance
from deepinfer_lab.lab.experiment import Experiment, banner, obtain, obtain_all
from deepinfer_lab.lab.record import Record, load

SLUG = "cpu-test-2-cores"


def rows(params: dict) -> Iterator[dict]:
    for number in range(params["count"]):
        yield {"number": number, "scaled_ms": np.float32(number) * params["scale"]}


def breaking(error: BaseException) -> Callable[[dict], Iterator[dict]]:
    def measure(params: dict) -> Iterator[dict]:
        yield from rows(params)
        raise error

    return measure


def an_experiment(measure=rows, runs_on_cpu=True) -> Experiment:
    return Experiment("count_up", measure, {"count": 3, "scale": 1.0, "sizes": (1, 2)}, runs_on_cpu, "Counts.")


@pytest.fixture(autouse=True)
def _on_a_known_cpu(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(provenance, "device_slug", lambda: SLUG)
    monkeypatch.setattr(provenance, "_commit", lambda: (None, None))


def publish(home: Path, record: Record, device: str = SLUG) -> Path:
    path = home / "data" / device / "count_up.json"
    record.save(path)
    return path


def measure(experiment: Experiment, **params) -> Record:
    return obtain(experiment, mode="measure", device="unused", params=params)


def test_measure_files_a_record_and_replay_reads_it(home: Path):
    measured = measure(an_experiment(), count=2)
    assert measured.samples == [{"number": 0, "scaled_ms": 0.0}, {"number": 1, "scaled_ms": 1.0}]
    assert measured.params == {"count": 2, "scale": 1.0, "sizes": [1, 2]}
    assert measured.status == "OK"
    assert load(home / "build" / "data" / SLUG / "count_up.json") == measured
    assert list((home / "data").iterdir()) == []  # only publishing writes there
    publish(home, measured)
    assert obtain(an_experiment(), mode="replay", device=SLUG, params={"count": 2}) == measured


def test_replay_refuses_other_parameters_and_lists_them(home: Path):
    publish(home, measure(an_experiment(), count=2))
    with pytest.raises(RecordError) as error:
        obtain(an_experiment(), mode="replay", device=SLUG, params={"count": 4, "sizes": [1]})
    message = str(error.value)
    assert "count (record: 2, asked: 4)" in message
    assert "sizes (record: [1, 2], asked: [1])" in message
    assert "scale" not in message
    assert "mode=measure" in message


def test_replay_refuses_a_record_that_lacks_a_parameter(home: Path):
    record = measure(an_experiment())
    del record.params["scale"]
    publish(home, record)
    with pytest.raises(RecordError, match=r"scale \(record: absent, asked: 1.0\)"):
        obtain(an_experiment(), mode="replay", device=SLUG)


def test_a_missing_record_lists_the_devices_that_have_one(home: Path):
    publish(home, measure(an_experiment()))
    with pytest.raises(RecordError, match=f"'nvidia-h200'; devices that have one: {SLUG}"):
        obtain(an_experiment(), mode="replay", device="nvidia-h200")


def test_a_misfiled_record_is_refused(home: Path):
    publish(home, measure(an_experiment()), device="nvidia-h200")
    with pytest.raises(RecordError, match=f"device_slug is '{SLUG}'"):
        obtain(an_experiment(), mode="replay", device="nvidia-h200")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "OOM"),
        (MemoryError("cupy's is one"), "OOM"),
        (OutOfDeviceMemory("request r: even alone"), "OOM"),
        (RuntimeError("CUDA error: out of memory"), "OOM"),
        (TimeoutError(), "TIMEOUT"),
    ],
)
def test_out_of_memory_and_timeout_keep_what_finished_and_are_said(home: Path, error: Exception, status: str):
    with pytest.raises(RecordError, match=f"needs whole records, but count_up ended as {status} after 3 rows"):
        measure(an_experiment(breaking(error)))
    folder = home / "build" / "data" / SLUG
    record = load(folder / "count_up.json")
    assert (record.status, len(record.samples)) == (status, 3)
    assert [path.name for path in folder.iterdir()] == ["count_up.json"]
    publish(home, record)
    with pytest.raises(RecordError, match=f"count_up ended as {status}"):
        obtain(an_experiment(), mode="replay", device=SLUG)


def test_one_that_is_cut_short_does_not_keep_the_others_from_being_measured(home: Path):
    experiments = [replace(an_experiment(breaking(MemoryError())), name="first"), an_experiment()]
    with pytest.raises(RecordError, match=r"but first ended as OOM after 3 rows$"):
        obtain_all(experiments, mode="measure", device="unused")
    assert load(home / "build" / "data" / SLUG / "count_up.json").whole
    both = obtain_all([an_experiment(), replace(an_experiment(), name="other")], mode="measure", device="unused")
    assert list(both) == ["count_up", "other"]


@pytest.mark.parametrize("between", [True, False])
def test_the_time_limit_ends_an_experiment(monkeypatch: pytest.MonkeyPatch, between: bool):
    def endless(_: dict) -> Iterator[dict]:
        yield {"a": 1}
        while True:
            if between:
                yield {"a": 2}
            else:
                threading.Event().wait(60)  # a row that does not come: the timer ends it

    if between:
        monkeypatch.delattr(signal, "setitimer", raising=False)  # as on Windows
    monkeypatch.setenv("DEEPINFER_TIME_LIMIT", "0.2")
    handler = signal.getsignal(signal.SIGALRM)
    record = experiment_module.measure(an_experiment(endless), {})
    assert record.status == "TIMEOUT"
    assert record.samples[0] == {"a": 1}
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_a_time_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("DEEPINFER_TIME_LIMIT", value)
    with pytest.raises(SettingError, match=f"DEEPINFER_TIME_LIMIT is '{value}', not a positive number"):
        measure(an_experiment())


def test_a_row_that_is_not_correct_marks_the_record():
    assert measure(an_experiment(lambda _: [{"correct": True}, {"correct": False}])).status == "INCORRECT"
    assert measure(an_experiment(lambda _: [{"correct": True}])).status == "OK"


def kept_rows(home: Path) -> list[dict]:
    lines = (home / "build" / "data" / SLUG / "count_up.partial.jsonl").read_text().splitlines()
    begun, *rows = map(json.loads, lines)
    assert (begun["experiment"], begun["provenance"]["device_slug"]) == ("count_up", SLUG)
    return rows


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad kernel")])
def test_an_interruption_keeps_finished_rows_apart(home: Path, error: BaseException):
    folder = home / "build" / "data" / SLUG
    with pytest.raises(type(error)):
        measure(an_experiment(breaking(error)))
    assert [path.name for path in folder.iterdir()] == ["count_up.partial.jsonl"]
    assert [row["number"] for row in kept_rows(home)] == [0, 1, 2]
    measure(an_experiment())
    assert [path.name for path in folder.iterdir()] == ["count_up.json"]  # finished: the partial one is stale


def test_a_process_that_is_killed_leaves_the_rows_that_came(home: Path):
    script = """
import os
from deepinfer_lab.lab import experiment, provenance
def rows(params):
    yield {"a": 1}
    yield {"a": 2}
    os._exit(9)
provenance.device_slug = lambda: "cpu-test-2-cores"
experiment.measure(experiment.Experiment("count_up", rows, {}, True, ""), {})
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert kept_rows(home) == [{"a": 1}, {"a": 2}]


def test_a_row_that_json_cannot_hold_stops_at_once(home: Path):
    with pytest.raises(RecordError, match=r"'count_up': row 1\.a is nan"):
        measure(an_experiment(lambda _: [{"a": 1.0}, {"a": float("nan")}]))
    assert kept_rows(home) == [{"a": 1.0}]


def counted(calls: list[dict]) -> Callable[[dict], list[dict]]:
    """Rows that say which call they are of."""
    return lambda params: calls.append(params) or [{"call": len(calls)}]


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provenance, "_commit", lambda: ("c" * 40, False))


@pytest.mark.usefixtures("committed")
def test_what_is_finished_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[dict] = []
    experiment = an_experiment(counted(calls))
    with journal.kept_in(home / "outcomes"):
        first = measure(experiment)
        assert measure(experiment) == first
        assert len(calls) == 1
        measure(experiment, count=7)
        assert len(calls) == 2
        monkeypatch.setenv("DEEPINFER_AGAIN", "1")
        measure(experiment, count=7)
        assert len(calls) == 3
    assert [each.status for each in journal.read(home / "outcomes")] == ["OK", "kept", "OK", "OK"]


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_commit", ("d" * 40, False)),
        ("_commit", ("c" * 40, True)),
        ("_commit", (None, None)),
        ("kernel_hashes", {"a.cu": "1"}),
        ("_cupy_version", "cupy 1"),
    ],
)
def test_other_code_or_another_environment_measures_anew(monkeypatch: pytest.MonkeyPatch, name: str, value: object):
    calls: list[dict] = []
    measure(an_experiment(counted(calls)))
    monkeypatch.setattr(provenance, name, lambda: value)
    measure(an_experiment(counted(calls)))
    assert len(calls) == 2


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize("first", [MemoryError(), TimeoutError(), ValueError()])
def test_what_was_cut_short_is_measured_anew(first: Exception):
    with pytest.raises((RecordError, ValueError)):
        measure(an_experiment(breaking(first)))
    assert measure(an_experiment()).status == "OK"


@pytest.mark.usefixtures("committed")
def test_a_broken_file_is_measured_anew(home: Path):
    measure(an_experiment())
    (home / "build" / "data" / SLUG / "count_up.json").write_text("{")
    assert measure(an_experiment()).status == "OK"


def test_unknown_parameters_and_names_are_refused():
    with pytest.raises(SettingError, match="no parameter speed; allowed: count, scale, sizes"):
        measure(an_experiment(), speed=1)
    with pytest.raises(SettingError, match="not a JSON value"):
        measure(an_experiment(), scale=object())
    with pytest.raises(SettingError, match=r"'\.\./x'"):
        Experiment("../x", rows, {}, True, "")


def test_a_gpu_experiment_needs_a_gpu_to_be_measured(home: Path):
    with pytest.raises(SettingError, match="needs a CUDA GPU"):
        measure(an_experiment(runs_on_cpu=False))
    publish(home, measure(an_experiment()))
    assert obtain(an_experiment(runs_on_cpu=False), mode="auto", device=SLUG).samples  # auto replays it


def test_banner_says_whose_numbers_follow():
    origin = {"device": "NVIDIA H200", "device_slug": "nvidia-h200", "utc": "2026-01-02T03:04:05+00:00"}
    more = {"driver": "550.90", "cuda": "12.4", "commit": "0123456789abcdef", "dirty": True}
    assert banner(Record("gemm", {}, origin | more, "OK", [{"a": 1}])) == (
        "gemm: NVIDIA H200, driver 550.90, CUDA 12.4\n"
        "measured 2026-01-02T03:04:05+00:00, commit 0123456789ab with local changes, status OK, 1 rows"
    )
    plain = banner(Record("gemm", {}, origin, "OOM", []))
    assert "commit unknown, status OOM" in plain
    assert "driver" not in plain
