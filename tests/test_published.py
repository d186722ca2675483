"""The article's numbers are stored as printed, and its ratios follow from its own numbers."""

import json
from pathlib import Path

import pytest

from deepinfer_lab.errors import RecordError
from deepinfer_lab.lab import published

HOME = Path(__file__).resolve().parents[1]
ROUNDING = 0.005 + 1e-9  # the article prints ratios with two decimals
UNITS = ("_ms", "_s", "_per_s", "_bits", "_steps")
WITHOUT_UNIT = {"kernel", "m", "n", "k", "batch", "concurrency", "speedup", "metric"}


@pytest.fixture(autouse=True)
def _real_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_HOME", str(HOME))


def test_sections_and_shapes():
    assert {section: published.table(section).shape for section in published.tables()} == {
        "2.7": (5, 8), "3.2": (3, 8), "5.1": (3, 6), "5.2": (3, 8), "5.3": (3, 3),
    }  # fmt: skip


def test_every_table_says_how_and_on_what_it_was_measured():
    for section, table in published.tables().items():
        assert table["hardware"] == {
            "gpu": "NVIDIA RTX 3050 Laptop", "compute_capability": "8.6", "memory_gb": 4, "os": "Windows, WDDM",
            "torch": "2.5.1+cu121", "cuda": "12.1", "cupy": "14.2",
        }, section  # fmt: skip
        assert table["method"]
        assert table["title"]
        assert all(isinstance(note, str) and note for note in table["notes"])


def test_source_is_named():
    source = json.loads((HOME / "data" / "published" / published.FILE).read_text(encoding="utf-8"))["source"]
    assert source["date"] == "2026-10-27"
    assert "part 7" in source["title"]


def test_columns_name_their_units():
    for section in published.tables():
        frame = published.table(section)
        assert not frame.isna().any().any()
        assert [name for name in frame.columns if name not in WITHOUT_UNIT and not name.endswith(UNITS)] == [], section


@pytest.mark.parametrize(
    ("section", "before", "after"),
    [("2.7", "fallback_ms", "tiled_ms"), ("3.2", "per_row_ms", "batch_tile_ms")],
)
def test_speedup_is_old_time_over_new(section: str, before: str, after: str):
    frame = published.table(section)
    assert ((frame[before] / frame[after] - frame["speedup"]).abs() <= ROUNDING).all()


def test_end_to_end_speedup_is_new_throughput_over_old():
    frame = published.table("5.1")
    assert ((frame["new_tokens_per_s"] / frame["old_tokens_per_s"] - frame["speedup"]).abs() <= ROUNDING).all()


def test_ranges_of_the_summary_are_those_of_the_table():
    speedups = published.table("2.7").groupby("weight_bits")["speedup"].agg(["min", "max"])
    assert speedups.loc[4].tolist() == [2.24, 2.87]
    assert speedups.loc[3].tolist() == [7.71, 9.45]


def test_new_of_5_1_is_overlap_of_5_2():
    end_to_end, overlap = (published.table(section).set_index("concurrency") for section in ("5.1", "5.2"))
    assert end_to_end["new_tokens_per_s"].tolist() == overlap["overlap_tokens_per_s"].tolist()


def test_tpot_of_5_2_is_in_seconds():
    """At concurrency 1, 16 tokens take TTFT + 15 × TPOT; that must give the printed throughput."""
    ttft_s = published.table("5.1").set_index("concurrency").loc[1, "new_ttft_p50_s"]
    alone = published.table("5.2").set_index("concurrency").loc[1]
    assert 16 / (ttft_s + 15 * alone["overlap_tpot_p50_s"]) == pytest.approx(alone["overlap_tokens_per_s"], rel=0.01)


@pytest.mark.parametrize(
    ("section", "words"),
    [("3.2", "M=30 cannot hold"), ("5.1", "two things at once"), ("5.2", "small in §0 and marked in §5.2")],
)
def test_disagreements_of_the_article_are_noted(section: str, words: str):
    assert any(words in note for note in published.table(section).attrs["notes"])


def test_other_sections_and_malformed_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RecordError, match=r"section '9.9'; allowed: 2.7, 3.2, 5.1, 5.2, 5.3"):
        published.table("9.9")
    for folder in ("notebooks", "data/published"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path))
    file = tmp_path / "data" / "published" / published.FILE
    with pytest.raises(RecordError, match="no such file"):
        published.tables()
    for text, message in (("{", "not JSON"), ("{}", "tables must be"), ('{"tables": [{}]}', r"tables\[0\] must have")):
        file.write_text(text)
        with pytest.raises(RecordError, match=message):
            published.tables()


# --- other people's kernels ---


def test_the_peers_file_says_where_it_is_from_and_holds_all_cells():
    path = HOME / "data" / "published" / published.PEERS_FILE
    source = json.loads(path.read_text(encoding="utf-8"))["source"]
    assert source["date"] == "2026-11-29"
    assert "this project's own peer measurement" in source["title"]
    cells = published.table("gemm", published.PEERS_FILE)
    assert cells.shape == (756, 8)
    assert not cells.duplicated(["peer", "m", "n", "k"]).any()
    assert (cells["time_us"] > 0).all()
    assert (cells["rel_err"] < 5e-3).all()  # as its method says
    assert (cells["group"].isna() == (cells["bits"] == 16)).all()
    assert set(cells.loc[cells["bits"] != 16, "group"]) == {published.PEERS_GROUP}
    assert {name for name in cells.columns if not name.endswith(UNITS)} == WITHOUT_UNIT & {"m", "n", "k"} | {
        "peer", "bits", "group", "time_us", "rel_err",
    }  # fmt: skip
    ceilings = published.table("ceilings", published.PEERS_FILE).iloc[0]
    assert ceilings["copy_gb_per_s"] < ceilings["read_sum_gb_per_s"] < 4800  # the card's data sheet


def test_the_best_peer_is_the_fastest_of_the_same_bits():
    best = published.best_peers()
    assert len(best) == 2 * 7 * 12
    assert best[4, 1, 5632, 2048] == (6.005, "tinygemm_w4")
    cells = published.table("gemm", published.PEERS_FILE)
    for (bits, m, n, k), (us, name) in best.items():
        same = cells[(cells["bits"] == bits) & (cells["m"] == m) & (cells["n"] == n) & (cells["k"] == k)]
        assert us == same["time_us"].min()
        assert name in set(same.loc[same["time_us"] == us, "peer"])


# --- kernels that were dropped ---


def test_what_was_tried_and_dropped_says_by_how_much():
    ring = published.table("ring", "tried_h200.json")
    assert (ring["ring_us"] / ring["registers_us"]).min() > 0.98  # it never won by more than noise
    assert (ring["ring_us"] / ring["registers_us"]).max() > 1.2
    assert "raw timings were not kept" in ring.attrs["notes"][0]
    ahead = published.table("read_ahead", "tried_h200.json")
    assert (ahead["with_ms"] / ahead["without_ms"]).min() > 0.998
    assert (ahead["with_ms"] / ahead["without_ms"]).max() > 1.03
    assert "raw timings were not kept" in ahead.attrs["notes"][0]
    arranging = published.table("arranging", "tried_h200.json")
    assert (arranging["words_us"] / arranging["arranged_us"]).min() > 1.01
    assert (arranging["lanes_us"] / arranging["arranged_us"]).min() > 0.98
    assert "raw timings were not kept" in arranging.attrs["notes"][0]
    assert published.table("issue", "tried_h200.json").attrs["method"].startswith("Nsight Compute")
