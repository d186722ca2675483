"""Who is ahead of whom, from a record and the published cells."""

import math
from pathlib import Path

import pytest

from deepinfer_lab.lab import published
from deepinfer_lab.lab.kernel_peers import CUBLAS, OURS
from deepinfer_lab.lab.kernel_standings import by_range, standings
from deepinfer_lab.lab.record import Record

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _real_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPINFER_HOME", str(HOME))


def row(peer, bits, m, us, kernel="k", correct=True):
    return {"peer": peer, "bits": bits, "m": m, "n": 5632, "k": 2048, "group": 128, "kernel": kernel, "correct": correct,
            "time_us": [us, us + 1, us + 9], "rel_err": 1e-4, "floor_us": 2.0}  # fmt: skip


def record(*rows, group=128) -> Record:
    return Record("kernel_peers", {"group": group}, {}, "OK", list(rows))


def test_the_fastest_right_kernel_of_either_side_counts():
    found = standings(
        record(row(OURS, 4, 1, 4.0, "slow"), row(OURS, 4, 1, 3.0, "fast"), row(OURS, 4, 1, 1.0, "wrong", correct=False),
               row("a", 4, 1, 7.0), row("b", 4, 1, 5.0), row("c", 4, 1, 1.0, correct=False), row(CUBLAS, 16, 1, 8.0)),
        "another card",
    )  # fmt: skip
    (only,) = found.itertuples()
    assert (only.kernel, only.us, only.peer, only.peer_us, only.cublas_us) == ("fast", 4.0, "b", 6.0, 9.0)
    assert (only.gain, only.reached) == (1.5, 0.5)


def test_published_cells_stand_beside_on_their_card_and_at_their_group_only():
    ours = row(OURS, 4, 1, 3.0)
    best_us, name = published.best_peers()[4, 1, 5632, 2048]
    here = standings(record(ours, row("slow", 4, 1, 50.0)), published.PEERS_DEVICE)
    assert len(here) == len(published.best_peers())
    mine = here.dropna(subset="us")
    assert mine[["peer", "peer_us"]].to_numpy().tolist() == [[f"{name}, published", best_us]]
    assert mine["cublas_us"].notna().all()  # published, as the record has none
    assert here["us"].notna().sum() == 1
    for found in (standings(record(ours), "another card"), standings(record(ours, group=64), published.PEERS_DEVICE)):
        assert len(found) == 1
        assert math.isnan(found["gain"].iloc[0])


def test_without_a_record_published_cells_stand_alone():
    alone = standings(None, published.PEERS_DEVICE)
    assert alone["us"].isna().all()
    assert alone["peer_us"].notna().all()
    assert by_range(alone).empty
    assert standings(None, "another card").empty


def test_ranges_have_their_geometric_mean_and_their_worst_cell():
    rows = [row(OURS, 4, 1, 3.0), row("a", 4, 1, 15.0), row(OURS, 4, 8, 7.0), row("a", 4, 8, 7.0), row(OURS, 3, 16, 3.0),
            row("a", 3, 16, 1.0), row(OURS, 4, 2048, 3.0), row("a", 4, 2048, 1.0), row(OURS, 4, 2, 5.0)]  # fmt: skip
    found = by_range(standings(record(*rows), "another card"))
    assert found.drop(columns=["mean", "least"]).to_numpy().tolist() == [
        [4, "1-8", 2, 1, "8 x 5632 x 2048, a"],
        [3, "16-64", 1, 0, "16 x 5632 x 2048, a"],
    ]
    assert found["mean"].tolist() == pytest.approx([2.0, 0.5])  # of 4 and 1
    assert found["least"].tolist() == [1.0, 0.5]
