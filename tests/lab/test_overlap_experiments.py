"""The overlap experiments, small and on a CPU: rows say what the notebooks read. Nothing overlaps here."""

import pytest

from deepinfer_lab.engine.placement import PARTITION
from deepinfer_lab.engine.policy import POLICIES
from deepinfer_lab.lab import overlap_experiments as experiments
from deepinfer_lab.lab.record import check_row

TINY = {"model": "synthetic:tiny", "bits": "w4", "group": 32}
SETTING = {"policy", "placement", "sizer", "join", "chunk", "max_in_flight", "graphs", "itl_target_ms", "model", "bits"}
COUNTED = {"prefill_decode_overlap_steps", "prefill_decode_stream_overlap_steps"}
PHYSICAL = {"physical_overlap_ms", "gpu_idle_share"}


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch):
    monkeypatch.setattr("deepinfer_lab.lab.overlap_cells.KV_MIB", 1)


def checked(rows, *columns: str) -> list[dict]:
    rows = list(rows)
    for row in rows:
        check_row(row, "row")
        assert SETTING | set(columns) <= row.keys()
    return rows


def test_overlap_sweep():
    protocol = {
        "name": "small", **TINY, "policies": list(POLICIES), "chunk": 16, "prompt_tokens": 20, "new_tokens": 6,
        "concurrency": [1, 3], "requests_per_client": 2, "profiled": list(POLICIES), "profiled_concurrency": 3,
    }  # fmt: skip
    params = {
        "protocols": [protocol],
        "profiled_tokens": 2,
        "itl_target_ms": 10.0,
        "one_lane_target_ms": 10.0,
        "seed": 0,
    }
    rows = checked(experiments.overlap_sweep_rows(params), "protocol", "concurrency", *COUNTED, *PHYSICAL)
    assert [(row["policy"], row["concurrency"]) for row in rows] == [(p, c) for p in POLICIES for c in (1, 3)]
    for row in rows:
        assert (row["requests"], row["errors"]) == (2 * row["concurrency"], 0)
        assert len(row["itl_ms"]) == 5 * row["requests"]
        assert row["prefill_decode_stream_overlap_steps"] == 0
        assert row["physical_overlap_ms"] == (0 if row["concurrency"] == 3 else None)
    assert {row["placement"] for row in rows if row["policy"] == "mixed"} == {"fused"}


def test_long_insertion():
    case = {
        "name": "small", **TINY, "policies": ["serial", "mixed"], "chunks": [16, 64], "readers": [1, 2],
        "document_tokens": 100, "reader_prompt_tokens": 8, "itl_target_ms": 10.0, "one_lane_target_ms": 10.0,
    }  # fmt: skip
    rows = checked(
        experiments.long_insertion_rows({"cases": [case], "reader_tokens": 300, "seed": 0}), "case", *COUNTED
    )
    assert [(row["policy"], row["chunk"], row["readers"]) for row in rows] == [
        (p, c, r) for p in ("serial", "mixed") for c in (16, 64) for r in (1, 2)
    ]
    for row in rows:
        assert row["document_tokens"] == 100
        assert row["document_ttft_ms"] > 0
        assert min(len(row["steady_itl_ms"]), len(row["disturbed_itl_ms"])) > 0
        assert row["reader_times_ms"] == sorted(row["reader_times_ms"])


def test_chunk_inflight():
    params = {
        **TINY, "policy": "priority", "chunks": [8, 32], "max_in_flight": [1, 4], "prompt_tokens": 40, "new_tokens": 4,
        "concurrency": 2, "seed": 0,
    }  # fmt: skip
    rows = checked(experiments.chunk_inflight_rows(params), "concurrency")
    assert [(row["chunk"], row["max_in_flight"]) for row in rows] == [(8, 1), (8, 4), (32, 1), (32, 4)]
    assert [row["prefill_steps"] for row in rows] == [20, 20, 8, 8]


def test_overlap_ablation():
    params = {
        **TINY,
        "chunk": 16,
        "readers": 2,
        "document_tokens": 100,
        "reader_prompt_tokens": 8,
        "reader_tokens": 300,
        "seed": 0,
    }
    rows = checked(experiments.overlap_ablation_rows(params), "priority")
    assert len({(row["join"], row["graphs"], row["priority"]) for row in rows}) == len(rows) == 8


def test_cpu_gpu_gap():
    params = {
        **TINY,
        "policies": ["serial", "dual-stream"],
        "chunk": 16,
        "prompt_tokens": 20,
        "new_tokens": 3,
        "concurrency": [1, 2],
        "seed": 0,
    }
    rows = checked(experiments.cpu_gpu_gap_rows(params), *PHYSICAL)
    assert [(row["policy"], row["graphs"], row["concurrency"]) for row in rows] == [
        ("serial", True, 1), ("serial", True, 2), ("dual-stream", True, 1), ("dual-stream", True, 2),
        ("serial", False, 1), ("serial", False, 2),
    ]  # fmt: skip


def test_long_insertion_by_share_of_the_multiprocessors():
    case = {
        "name": "shares", **TINY, "policies": ["partition"], "decode_shares": [None, 3 / 8], "chunks": [64], "readers": [1],
        "document_tokens": 100, "reader_prompt_tokens": 8, "itl_target_ms": 10.0, "one_lane_target_ms": 10.0,
    }  # fmt: skip
    rows = checked(experiments.long_insertion_rows({"cases": [case], "reader_tokens": 300, "seed": 0}), "decode_share")
    assert [row["decode_share"] for row in rows] == [PARTITION.decode_share, 3 / 8]
