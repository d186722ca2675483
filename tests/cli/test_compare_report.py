"""`compare` and `report` from the outside, on the project's own records."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from deepinfer_lab.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_HOME", str(ROOT))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    """The H200's batch tile record, but one of its kernels takes half as long again, and one of its sources differs."""
    content = json.loads((ROOT / "data" / "nvidia-h200" / "w3_batch_tile.json").read_text(encoding="utf-8"))
    for row in content["samples"]:
        if row["kernel"] == "w3_gemv_warp_tile":
            row["time_us"] = [time * 1.5 for time in row["time_us"]]
    content["provenance"]["kernels"]["gemv.cuh"] = "0" * 64
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    (folder / "w3_batch_tile.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_compare_tells_what_became_slower_in_text_json_and_a_picture(slower: Path, tmp_path: Path):
    written, picture = tmp_path / "c.json", tmp_path / "pictures" / "c.svg"
    result = run("compare", "nvidia-h200", slower, "--json", written, "--picture", picture)
    assert result.exit_code == 0, result.output
    assert "kernels differ: gemv.cuh" in result.output
    (alone,) = [line for line in result.output.splitlines() if line.startswith("only in A: ")]
    assert "few_bits" in alone
    assert "w3_batch_tile" not in alone
    starred = [line for line in result.output.splitlines() if line.startswith("*")]
    assert len(starred) == 40
    assert all("1.500x" in line and "kernel=w3_gemv_warp_tile" in line for line in starred)
    assert "290 lines, 48 flagged" in result.output

    (pair,) = json.loads(written.read_text(encoding="utf-8"))["experiments"]
    flagged = [line for line in pair["lines"] if line["flagged"]]
    assert len(pair["lines"]) == 290
    assert {line["settings"]["kernel"] for line in flagged} == {"w3_gemv_warp_tile"}
    assert all(line["low"] <= line["ratio"] <= line["high"] for line in flagged)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")

    first = (written.read_bytes(), picture.read_bytes())
    run("compare", "nvidia-h200", slower, "--json", written, "--picture", picture)
    assert (written.read_bytes(), picture.read_bytes()) == first


def test_compare_shows_every_line_when_asked_and_only_the_experiments_asked_for(slower: Path):
    result = run("compare", "nvidia-h200", slower, "--experiment", "w3_batch_tile", "--all", "--tolerance", "0.6")
    assert result.exit_code == 0, result.output
    assert result.output.count(" w3_batch_tile ") == 290
    assert "290 lines, 0 flagged" in result.output
    assert "only in A" not in result.output


def test_two_machines_can_be_compared():
    result = run("compare", "nvidia-h200", "cpu-amd-epyc-2-cores")
    assert result.exit_code == 0, result.output
    assert "A: NVIDIA H200" in result.output
    assert "B: AMD EPYC" in result.output
    assert "few_bits perplexity bits=w4" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope", "nvidia-h200"], ["'nope'", "cpu-amd-epyc-2-cores, nvidia-h200"]),
        (["nvidia-h200", "published"], ["holds no record", "deepinfer_sm86_part7.json"]),
        (
            ["nvidia-h200", "cpu-amd-epyc-2-cores", "--experiment", "tiled_gemm"],
            ["B has no record of tiled_gemm", "few_bits"],
        ),
        (["nvidia-h200", "nvidia-h200", "--tolerance", "-1"], ["tolerance -1", "0"]),
        (["nvidia-h200", "nvidia-h200", "--picture", "a.png"], ["a.png", ".svg"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_one_line_that_names_the_value_and_what_is_allowed(arguments: list[str], said: list[str]):
    result = run("compare", *arguments)
    assert result.exit_code == 1
    assert len(result.output.strip().splitlines()) == 1
    for part in said:
        assert part in result.output


def test_nothing_to_draw_is_said(tmp_path: Path):
    origin = {"device": "A", "device_slug": "a", "utc": "now"}
    for name, m in (("a", 1), ("b", 2)):
        record = {"experiment": "gemm", "params": {}, "provenance": origin, "status": "OK", "schema_version": 1}
        (tmp_path / f"{name}.json").write_text(json.dumps({**record, "samples": [{"m": m, "kl": 1.0}]}))
    result = run("compare", tmp_path / "a.json", tmp_path / "b.json", "--picture", tmp_path / "c.svg")
    assert result.exit_code == 1
    assert "only in A: m = 1" in result.output
    assert "nothing to draw" in result.output


def test_report_says_where_it_is(tmp_path: Path):
    result = run("report", "--output", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    assert result.output == f"written: {tmp_path / 'r.html'}\n"
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
