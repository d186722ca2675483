import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_lab.errors import RecordError
from deepinfer_lab.lab.record import Record, load

PROVENANCE = {"device": "A card", "device_slug": "a-card", "utc": "2026-01-02T03:04:05+00:00"}
ROWS = [{"shape": "a", "tiled_ms": 1.5, "raw_ms": [1.0, 2.0]}, {"shape": "b", "tiled_ms": None, "raw_ms": []}]


def a_record(**changes) -> Record:
    return Record(**{"experiment": "gemm", "params": {"group": 128}, "provenance": PROVENANCE, "status": "OK"}
                  | {"samples": ROWS} | changes)  # fmt: skip


def test_a_record_comes_back_as_it_was(tmp_path: Path):
    path = tmp_path / "deep" / "gemm.json"
    a_record().save(path)
    assert load(path) == a_record()
    assert [p.name for p in path.parent.iterdir()] == ["gemm.json"]  # no temporary file stays


def test_bytes_do_not_depend_on_the_order_of_keys(tmp_path: Path):
    a_record().save(tmp_path / "a.json")
    a_record(samples=[dict(reversed(row.items())) for row in ROWS]).save(tmp_path / "b.json")
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert '\n    {"raw_ms": [1.0, 2.0], "shape": "a", "tiled_ms": 1.5},\n' in text


def test_a_reader_of_the_old_file_never_sees_the_new_one(tmp_path: Path):
    path, reader = tmp_path / "gemm.json", tmp_path / "reader.json"
    a_record().save(path)
    reader.hardlink_to(path)
    a_record(status="OOM").save(path)
    assert load(path).status == "OOM"
    assert load(reader) == a_record()  # replaced as a whole, not written over


def test_an_empty_record_is_valid_json(tmp_path: Path):
    a_record(samples=[], params={}, status="OOM").save(tmp_path / "a.json")
    assert load(tmp_path / "a.json").samples == []


def test_frame_has_one_row_a_sample():
    frame = a_record().frame()
    assert frame.shape == (2, 3)
    assert frame["tiled_ms"].iloc[0] == 1.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "FINE"}, "status is 'FINE', not one of OK"),
        ({"experiment": ""}, "experiment must be"),
        ({"params": []}, "params must be"),
        ({"schema_version": 2}, "schema_version is 2"),
        ({"schema_version": True}, "schema_version is True"),
        ({"provenance": {**PROVENANCE, "utc": ""}}, "provenance.utc"),
        ({"provenance": {"device": "A card", "utc": "now"}}, "provenance.device_slug"),
        ({"samples": {}}, "samples must be a list"),
        ({"samples": [{"a": 1}, {}]}, r"samples\[1\]: a row must be a non-empty object"),
        ({"samples": [{"a": {"b": 1}}]}, r"samples\[0\].a: a tidy row"),
        ({"samples": [{"a": [[1]]}]}, r"samples\[0\].a: a tidy row"),
    ],
)
def test_load_names_the_file_and_the_field(tmp_path: Path, changes: dict, message: str):
    path = tmp_path / "gemm.json"
    a_record().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(RecordError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("field", ["experiment", "params", "provenance", "samples", "schema_version", "status"])
def test_every_field_is_required(tmp_path: Path, field: str):
    path = tmp_path / "gemm.json"
    a_record().save(path)
    content = json.loads(path.read_text())
    del content[field]
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=rf"missing field\(s\) {field};"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not plain JSON"),
        ("[]", "must be a JSON object, not list"),
        ('{"status": "OK", "status": "OOM"}', "repeated key.* status"),
        ('{"colour": 1}', "missing field"),
    ],
)
def test_malformed_text_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "gemm.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        load(tmp_path / "gemm.json")


def test_unknown_field_and_missing_file_are_refused(tmp_path: Path):
    path = tmp_path / "gemm.json"
    with pytest.raises(RecordError, match="no such record"):
        load(path)
    a_record().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": 1}))
    with pytest.raises(RecordError, match=r"unknown field\(s\) colour"):
        load(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64(1.0), np.int64(1), (1, 2)])
def test_save_refuses_what_json_cannot_hold_and_keeps_the_old_file(tmp_path: Path, value: object):
    path = tmp_path / "gemm.json"
    a_record().save(path)
    with pytest.raises(RecordError, match=r"samples\[0\].a is"):
        a_record(samples=[{"a": value}]).save(path)
    assert load(path) == a_record()


def test_load_refuses_nan(tmp_path: Path):
    path = tmp_path / "gemm.json"
    a_record().save(path)
    path.write_text(path.read_text().replace("1.5", "NaN"))
    with pytest.raises(RecordError, match=r"samples\[0\].tiled_ms is nan"):
        load(path)
