"""The capacity experiment, small and on a CPU, its tables, and the budget's course with a GPU's memory made up."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer_lab.lab import capacity_experiments as capacity
from deepinfer_lab.lab import capacity_tables, cells, published
from deepinfer_lab.lab.record import Record, check_row

TINY = {"model": "synthetic:tiny", "bits": "w4", "group": 32}
PARAMS = {
    "cpu": {
        **TINY, "policies": ["serial", "mixed"], "chunk": 16, "prompt_tokens": 20, "new_tokens": 5, "clients": [1, 3],
        "requests_per_client": 2, "requests": 6,
        "open": [{"loop": "poisson", "cv": 1.0, "parts": [0.5, 2.0]}, {"loop": "bursty", "cv": 3.0, "parts": [1.0]}],
    },
    "seed": 0,
}  # fmt: skip
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("deepinfer_lab.lab.overlap_cells.KV_MIB", 1)
    monkeypatch.setattr(capacity, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(capacity, "matrix_rate", lambda device, dtype: 1e10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer_lab.lab.overlap_cells.KV_MIB", 1)
        patch.setattr(capacity, "read_bandwidth", lambda device: 1e9)
        patch.setattr(capacity, "matrix_rate", lambda device, dtype: 1e10)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return list(capacity.capacity_rows(PARAMS))


def record(rows) -> Record:
    provenance = {"device": "x", "device_slug": "x", "utc": "now"}
    return Record("capacity", PARAMS, provenance, "OK", rows)


def test_rows(rows):
    for row in rows:
        check_row(row, "row")
    assert [row["row"] for row in rows] == ["machine"] + ["loop"] * 10
    loops = [(row["policy"], row["loop"], row.get("clients"), row.get("part")) for row in rows[1:]]
    for policy, found in (("serial", loops[:5]), ("mixed", loops[5:])):
        assert found == [
            (policy, "closed", 1, None), (policy, "closed", 3, None), (policy, "poisson", None, 0.5),
            (policy, "poisson", None, 2.0), (policy, "bursty", None, 1.0),
        ]  # fmt: skip
    for row in rows[1:]:
        assert row["errors"] == 0
        assert len(row["ttft_ms"]) == row["requests"]
        for i, ttft in enumerate(row["ttft_ms"]):
            assert sum(row[f"{part}_ms"][i] for part in capacity.PARTS) == pytest.approx(ttft, abs=0.01)
            assert row["e2e_ms"][i] >= ttft


def test_all_policies_face_the_same_rates(rows):
    asked = {}
    for row in rows[1:]:
        if row["loop"] != "closed":
            asked.setdefault((row["loop"], row["part"]), set()).add(row["asked_per_s"])
    assert all(len(rates) == 1 for rates in asked.values())
    assert asked["poisson", 2.0].pop() == pytest.approx(4 * asked["poisson", 0.5].pop())


def test_loop_table(rows):
    table, slo = capacity_tables.loop_table(record(rows), 10, 2)
    assert np.allclose(table["N"], table["served/s"] * table["W ms"] / 1e3)
    assert (table["good/s"] <= table["served/s"]).all()
    assert slo.ttft * 1e3 == pytest.approx(10 * np.median(rows[1]["ttft_ms"]))
    closed = table[table["loop"] == "closed"]
    assert (closed["N"] <= closed["clients"] + 1e-6).all()
    assert table["name"][:3].tolist() == ["closed, 1 clients", "closed, 3 clients", "poisson, 50%"]


def test_share_within():
    slo = capacity_tables.Slo(0.1, 0.01)
    assert capacity_tables.share_within(slo, [50, 150, 100], [10, 5, 20]) == pytest.approx(1 / 3)


def test_loads_are_cells_of_their_own_when_compared(rows):
    kinds = cells.kinds(record(rows), record(rows))
    assert (kinds["part"], kinds["cv"], kinds["ttft_ms"], kinds["clients"]) == (
        "setting",
        "setting",
        "number",
        "setting",
    )


@pytest.mark.parametrize(
    ("fails", "reached"), [(None, "served"), ("load_model", "nothing"), ("Engine", "loaded")]
)  # fmt: skip
def test_budget(monkeypatch, fails, reached):
    fractions = []
    memory = {
        "empty_cache": lambda: None, "reset_peak_memory_stats": lambda: None, "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1000 * MIB),
        "set_per_process_memory_fraction": fractions.append, "memory_allocated": lambda: 5 * MIB,
        "memory_reserved": lambda: 6 * MIB, "max_memory_reserved": lambda: 7 * MIB,
        "mem_get_info": lambda: (900 * MIB, 1000 * MIB),
    }  # fmt: skip
    for name, does in memory.items():
        monkeypatch.setattr(torch.cuda, name, does)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)  # not on a CPU
    if fails is not None:

        def full(*_, **__):
            raise torch.cuda.OutOfMemoryError("no more\nof it")

        monkeypatch.setattr(capacity, fails, full)
    case = {
        **TINY, "policy": "serial", "chunk": 16, "clients": 2, "prompt_tokens": 20, "new_tokens": 4, "reserve_mib": 10,
    }  # fmt: skip
    row = capacity.budget_row(case, 20, 0)
    check_row(row, "row")
    assert fractions == [0.02, 1.0]
    assert (row["reached"], row["reason"]) == (reached, None if fails is None else "OutOfMemoryError: no more")
    assert row["kv_mib"] == (4 if reached == "served" else None)
    assert (row["peak_bytes"], row["device_used_bytes"]) == (7 * MIB, 100 * MIB)


def test_data_sheets():
    sheets = published.data_sheets()
    assert sheets["rtx-3050-laptop"]["memory_bytes"] == 4 << 30
    for sheet in sheets.values():
        assert sheet["source"]
        assert sheet["flops_per_s"] > sheet["bytes_per_s"] > 0
