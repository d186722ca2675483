"""The experiment on a GPU's answers, small and on a CPU, where they are the CPU's own."""

from deepinfer_lab.lab import batch_invariance
from deepinfer_lab.lab.record import check_row


def test_rows(monkeypatch):
    monkeypatch.setattr("deepinfer_lab.lab.overlap_cells.KV_MIB", 1)
    params = {
        "agreement": {"model": "synthetic:tiny", "bits": "w4", "group": 32, "positions": 40},
        "cost": {
            "model": "synthetic:tiny", "bits": "w4", "group": 32, "policy": "priority", "chunk": 16, "prompt_tokens": 20,
            "new_tokens": 4, "concurrency": [1, 2], "seed": 0,
        },
    }  # fmt: skip
    rows = list(batch_invariance.batch_invariance_rows(params))
    for row in rows:
        check_row(row, "row")
    agreement = [row for row in rows if row["row"] == "agreement"]
    assert [row["variant"] for row in agreement] == ["article's kernels", "card's table", "batch-invariant"]
    assert {row["top1_agreement"] for row in agreement} == {1.0}
    cost = [(row["batch_invariant"], row["concurrency"]) for row in rows if row["row"] == "cost"]
    assert cost == [(False, 1), (False, 2), (True, 1), (True, 2)]
