import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.errors import RecordError, SettingError
from deepinfer_lab.lab import compare as module
from deepinfer_lab.lab.cells import cells, keys, kinds
from deepinfer_lab.lab.compare import Line, Pair, compare, find, forest, ranked
from deepinfer_lab.lab.record import Record, load

DATA = Path(__file__).parents[2] / "data"
COMMITTED = [path for path in sorted(DATA.glob("*/*.json")) if module.is_record(path)]


def a_record(samples: list[dict[str, Any]], params: dict[str, Any] | None = None, **changes: Any) -> Record:
    origin = {"device": "A", "device_slug": "a", "utc": "now", "kernels": {"gemv.cuh": "1"}}
    return replace(Record("gemm", params or {}, origin, "OK", samples), **changes)


def pair_of(a: Record, b: Record, **options: Any) -> Pair:
    (pair,) = compare({a.experiment: a}, {b.experiment: b}, **options)
    return pair


def times(m: int, scale: float = 1.0, count: int = 21, **more: Any) -> dict[str, Any]:
    noise = np.random.default_rng(m).normal(0, 0.005, count)
    return {"kernel": "w4_gemv", "m": m, "time_us": ((1 + noise) * 10 * m * scale).tolist(), **more}


# What a column is


def test_columns_are_told_apart_by_what_they_hold():
    row = {
        "kernel": "w4", "m": 1, "graphs": True, "group": None, "chunk": 64, "rate": 0.5, "itl_target_ms": 9.2,  # settings
        "time_us": [1.0, 2], "kl": 0.1, "errors": 0, "step_bytes": 5, "bytes3": 5, "decode_steps": 3,  # numbers
        "text": "a", "correct": True, "in_w4": ["0.qkv"], "tokens_out": [3, 4],  # words
        "request": "c1-0", "floor_us": 1.5, "threads": 2,  # nothing
    }  # fmt: skip
    record = a_record([row], {"rate": 0.5})
    found = kinds(record, record)
    for kind, names in (
        ("setting", ["kernel", "m", "graphs", "group", "chunk", "rate", "itl_target_ms"]),
        ("number", ["time_us", "kl", "errors", "step_bytes", "bytes3", "decode_steps"]),
        ("word", ["text", "correct", "in_w4", "tokens_out"]),
        ("nothing", ["request", "floor_us", "threads"]),
    ):
        assert {name: found[name] for name in names} == dict.fromkeys(names, kind)
    assert len(found) == len(row)


def test_a_float_that_is_whole_on_one_side_or_missing_is_still_a_number():
    a, b = a_record([{"m": 1, "share": None}]), a_record([{"m": 1, "share": 0.5}])
    assert kinds(a, b)["share"] == kinds(b, a)["share"] == "number"
    assert pair_of(a, b).lines == []


def test_points_in_time_become_durations():
    row = {"concurrency": 1, "request": "c1-0", "sent_s": 100.0, "token_times_s": [100.5, 100.6, 100.8]}
    step = {"concurrency": 1, "lane": "main", "started_s": 100.0, "finished_s": 100.25}
    record = a_record([row, step])
    columns = kinds(record, record)
    assert "token_times_s" not in columns
    (request, ran) = cells(record, columns, keys(record, record, columns)).values()
    assert request.numbers["itl_ms"] == pytest.approx((100, 200))
    assert request.numbers["ttft_ms"] == pytest.approx((500,))
    assert ran.numbers["step_ms"] == pytest.approx((250,))


def test_rows_with_the_same_settings_are_pooled():
    record = a_record([{"m": 1, "time_us": [1.0, 2.0]}, {"m": 2, "time_us": [9.0]}, {"m": 1, "time_us": [3.0]}])
    columns = kinds(record, record)
    assert {key: cell.numbers["time_us"] for key, cell in cells(record, columns, ["m"]).items()} == {
        (("m", 1),): (1.0, 2.0, 3.0),
        (("m", 2),): (9.0,),
    }


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_committed_record_is_itself(path: Path):
    """Whatever is measured is compared, nothing that was measured tells rows apart, and all of it is the same."""
    record = load(path)
    pair = pair_of(record, record)
    assert pair.lines
    assert {line.ratio for line in pair.lines} == {1.0}
    assert not any(line.flagged for line in pair.lines)
    assert all(line.low <= 1 <= line.high for line in pair.lines if line.low is not None)
    assert not [note for note in pair.notes if "hashes" not in note]
    assert len({(line.experiment, line.label) for line in pair.lines}) == len(pair.lines)  # labels tell lines apart
    assert not {"time_us", "token_times_s", "kl", "perplexity"} & set(pair.matched_by)


# Ratios, intervals, flags


def test_a_slower_kernel_is_flagged_and_comes_first():
    a = a_record([times(1), times(2), times(4)])
    b = a_record([times(1, 1.001), times(2, 1.2), times(4, 0.95)])
    lines = pair_of(a, b).lines
    assert [line.settings["m"] for line in lines] == [2, 4, 1]
    assert [line.flagged for line in lines] == [True, True, False]
    slow = lines[0]
    assert slow.ratio == pytest.approx(1.2, abs=1e-9)
    assert 1.03 < slow.low < 1.2 < slow.high
    assert (slow.samples_a, slow.samples_b, slow.statistic) == (21, 21, "median")
    assert slow.parts == ("time_us", "m=2")  # all of them have the same kernel
    assert [line.flagged for line in pair_of(a, b, tolerance=0.3).lines] == [False, False, False]


@given(st.floats(0.2, 5), st.integers(0, 10))
def test_the_other_way_round_is_the_reciprocal(scale: float, seed: int):
    noise = np.random.default_rng(seed).lognormal(0, 0.05, (2, 15))
    a, b = (a_record([{"m": 1, "time_us": row.tolist()}]) for row in (noise[0], noise[1] * scale))
    (there,), (back,) = pair_of(a, b).lines, pair_of(b, a).lines
    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.distance == pytest.approx(back.distance)
    # Other draws, so not exactly: within a fifth of the interval's length.
    assert abs(np.log(there.low) + np.log(back.high)) < 0.2 * np.log(there.high / there.low)


def test_single_numbers_have_no_interval_and_are_never_flagged():
    (line,) = pair_of(
        a_record([{"bits": "w4", "perplexity": 10.0}]), a_record([{"bits": "w4", "perplexity": 20.0}])
    ).lines
    assert (line.ratio, line.low, line.high, line.flagged) == (2.0, None, None, False)


@pytest.mark.parametrize(
    ("of_a", "of_b", "ratio"), [(0.0, 0.0, 1.0), (0.0, 0.5, None), (0.5, 0.0, None), (-1.0, 1.0, None)]
)
def test_no_ratio_where_it_would_mean_nothing(of_a: float, of_b: float, ratio: float | None):
    a, b = (a_record([{"m": 1, "kl": kl}, {"m": 2, "kl": 1.0}]) for kl in (of_a, of_b))
    pair = pair_of(a, b)
    assert {line.settings["m"]: line.ratio for line in pair.lines} == {1: ratio, 2: 1.0}
    assert pair.lines[0].ratio is ratio or ratio == 1.0  # without a ratio: before all others
    assert len(forest([pair])) == (1 if ratio is None else 2)


def test_the_articles_method_is_compared_by_its_mean_and_gaps_by_their_tail_too():
    spread = [1.0] * 19 + [21.0]
    gaps = [5.0] * 195 + [50.0] * 5
    rows = [
        {"method": "article", "time_us": spread},
        {"method": "graph_cold", "time_us": spread},
        {"method": "served", "itl_ms": gaps},
    ]
    lines = pair_of(a_record(rows), a_record(rows)).lines
    assert {(line.settings["method"], line.statistic): line.a for line in lines} == {
        ("article", "mean"): 2.0,
        ("graph_cold", "median"): 1.0,
        ("served", "median"): 5.0,
        ("served", "p99"): 50.0,
    }


def test_a_line_does_not_depend_on_its_neighbours():
    one = pair_of(a_record([times(2)]), a_record([times(2, 1.1)])).lines[0]
    among = pair_of(a_record([times(1), times(2)]), a_record([times(1), times(2, 1.1)])).lines[0]
    assert (one.low, one.high) == (among.low, among.high)


# What is not the same


def test_everything_else_that_differs_is_said():
    a = a_record([times(1, text="x"), times(2), times(8)], {"seed": 0, "old": 1})
    b = a_record(
        [times(1, text="y"), times(2, kl=0.1), times(9)],
        {"seed": 1, "shapes": [1] * 99},
        provenance={**a.provenance, "kernels": {"gemv.cuh": "2", "new.cu": "3"}},
        status="INCORRECT",
    )
    notes = pair_of(a, b).notes
    for note in (
        "B is INCORRECT",
        "parameter old: 1 in A, absent in B",
        "parameter seed: 0 in A, 1 in B",
        "kernels differ: gemv.cuh",
        "kernels only in B: new.cu",
        "only in A: 1 of 3 settings",
        "only in A: m = 8",
        "only in B: m = 9",
        "only in B, at least in some settings: the metrics kl",
        'text differs in 1 of 2 settings, such as ["x"] in A, ["y"] in B',
    ):
        assert note in notes
    (long,) = [note for note in notes if note.startswith("parameter shapes")]
    assert len(long) < 120
    assert pair_of(a, a).notes == []


def test_missing_kernel_hashes_are_said():
    a = a_record([times(1)])
    b = replace(a, provenance={"device": "B", "device_slug": "b", "utc": "now"})
    assert "kernels: B without hashes, so nobody knows whether they are the same" in pair_of(a, b).notes


def test_a_new_column_that_is_the_same_everywhere_does_not_keep_rows_apart():
    a, b = a_record([times(1), times(2)]), a_record([times(1, lane="main"), times(2, lane="main")])
    pair = pair_of(a, b)
    assert len(pair.lines) == 2
    assert pair.matched_by == ["kernel", "m"]
    assert "not matched by lane: one side has it, the same in all rows" in pair.notes


@pytest.mark.parametrize("more", [{"lane": "other"}, {}])
def test_a_new_column_that_tells_rows_apart_is_not_pooled_away(more: dict[str, str]):
    a, b = a_record([times(1)]), a_record([times(1, lane="main"), times(1, 2.0, **more)])
    pair = pair_of(a, b)
    assert "lane" in pair.matched_by
    assert [line.samples_b for line in pair.lines] == ([21] if not more else [])


# Where records come from


def test_a_device_a_folder_and_a_file_are_found(home: Path, monkeypatch: pytest.MonkeyPatch):
    record = a_record([times(1)])
    record.save(home / "data" / "a" / "gemm.json")
    record.save(home / "build" / "data" / "a" / "gemm.json")
    (home / "data" / "a" / "dispatch.json").write_text('{"rows": []}')
    (home / "data" / "a" / "gemm.partial.jsonl").write_text("{")
    expected = {"gemm": record}
    for name in ("a", "data/a", "build/data/a", "data/a/gemm.json", str(home / "build" / "data" / "a")):
        assert find(name) == expected
    monkeypatch.chdir(home / "build")
    assert find("data/a") == expected


def test_what_is_not_found_is_named_with_what_there_is(home: Path):
    a_record([times(1)]).save(home / "data" / "a-card" / "gemm.json")
    (home / "data" / "empty").mkdir()
    (home / "data" / "tables").mkdir()
    (home / "data" / "tables" / "dispatch.json").write_text('{"rows": []}')
    for name, message in (
        ("b-card", r"'b-card' is no device.*: a-card$"),
        ("", r"'' is no device.*a-card"),
        ("empty", r"empty: holds no record; there is no \.json file"),
        ("tables", r"tables: holds no record; there is dispatch\.json"),
        ("data/tables/dispatch.json", r"dispatch\.json: missing field"),
    ):
        with pytest.raises(RecordError, match=message):
            find(name)
    (home / "data" / "a-card" / "broken.json").write_text("{")
    with pytest.raises(RecordError, match=r"broken\.json: not plain JSON"):
        find("a-card")
    (home / "data" / "a-card" / "broken.json").write_text((home / "data" / "a-card" / "gemm.json").read_text())
    with pytest.raises(RecordError, match=r"gemm\.json: a second record of gemm"):
        find("a-card")


def test_experiments_are_chosen_and_what_is_missing_is_named():
    a, b = a_record([times(1)]), a_record([times(1)], experiment="serve")
    both = {"gemm": a, "serve": b}
    assert [pair.experiment for pair in compare(both, both)] == ["gemm", "serve"]
    assert [pair.experiment for pair in compare(both, both, ["serve"])] == ["serve"]
    with pytest.raises(RecordError, match=r"no experiment in common: A has gemm; B has serve"):
        compare({"gemm": a}, {"serve": b})
    with pytest.raises(RecordError, match=r"B has no record of serve; it has gemm"):
        compare(both, {"gemm": a}, ["serve"])
    for tolerance in (-0.1, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="tolerance"):
            compare(both, both, tolerance=tolerance)


def test_records_without_rows_or_without_settings_are_no_trouble():
    assert pair_of(a_record([]), a_record([times(1)])).lines == []
    (line,) = pair_of(a_record([{"kl": 1.0}]), a_record([{"kl": 2.0}])).lines
    assert (line.label, line.ratio) == ("kl", 2.0)


def test_the_forest_has_the_farthest_and_says_once_what_all_share():
    a = a_record([times(m) for m in range(1, 50)])
    b = a_record([times(m, 1 + m / 100) for m in range(1, 50)])
    pair = pair_of(a, b)
    table = forest([pair], most=3)
    assert table["label"].tolist() == ["m=49", "m=48", "m=47"]
    assert table["common"].tolist() == ["time_us"] * 3
    assert forest([pair], most=1)["label"].tolist() == ["time_us m=49"]
    assert len(forest([pair])) == 30
    assert forest([]).empty
    lines: list[Line] = ranked([pair, pair_of(b, a)])
    assert [line.distance for line in lines] == sorted((line.distance for line in lines), reverse=True)


def test_settings_can_be_written_as_json():
    pair = pair_of(a_record([times(1, group=None)]), a_record([times(1, group=None)]))
    assert json.loads(json.dumps(pair.lines[0].settings)) == {"group": None, "kernel": "w4_gemv", "m": 1}
