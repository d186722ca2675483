from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_lab.errors import RecordError, SettingError
from deepinfer_lab.lab import provenance
from deepinfer_lab.lab.experiment import Experiment, banner, obtain
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
    ("error", "status"), [(torch.cuda.OutOfMemoryError("CUDA out of memory"), "OOM"), (TimeoutError(), "TIMEOUT")]
)
def test_out_of_memory_and_timeout_keep_what_finished(error: Exception, status: str):
    record = measure(an_experiment(breaking(error)))
    assert record.status == status
    assert len(record.samples) == 3


def test_a_row_that_is_not_correct_marks_the_record():
    assert measure(an_experiment(lambda _: [{"correct": True}, {"correct": False}])).status == "INCORRECT"
    assert measure(an_experiment(lambda _: [{"correct": True}])).status == "OK"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad kernel")])
def test_an_interruption_keeps_finished_rows_apart(home: Path, error: BaseException):
    folder = home / "build" / "data" / SLUG
    with pytest.raises(type(error)):
        measure(an_experiment(breaking(error)))
    assert [path.name for path in folder.iterdir()] == ["count_up.partial.json"]
    partial = load(folder / "count_up.partial.json")
    assert len(partial.samples) == 3
    assert partial.provenance["interrupted"] == type(error).__name__
    measure(an_experiment())
    assert [path.name for path in folder.iterdir()] == ["count_up.json"]  # finished: the partial one is stale


def test_a_row_that_json_cannot_hold_stops_at_once(home: Path):
    with pytest.raises(RecordError, match=r"'count_up': row 1\.a is nan"):
        measure(an_experiment(lambda _: [{"a": 1.0}, {"a": float("nan")}]))
    assert load(home / "build" / "data" / SLUG / "count_up.partial.json").samples == [{"a": 1.0}]


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
