"""The comparison with other people's kernels, with torch for a GPU and stand-ins for peers."""

from dataclasses import dataclass

import pytest
import torch
from torch_gpu import TorchGpu, use_torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.dispatch import ARTICLE, Row
from deepinfer_lab.lab import kernel_cells as cells
from deepinfer_lab.lab import kernel_dispatch, kernel_peers
from deepinfer_lab.lab.experiment import complete
from deepinfer_lab.lab.kernel_peers import CUBLAS, KERNEL_PEERS, OURS, median_us, peer_rows
from deepinfer_lab.lab.record import check_row

KEYS = {"peer", "bits", "m", "n", "k", "group", "kernel", "time_us", "rel_err", "floor_us", "correct"}
SMALL = {"shapes": [[8, 64]], "m": [1, 3], "group": 32}


@dataclass(frozen=True)
class StandIn:
    """A peer of 20 microseconds that computes with torch, times `factor`."""

    gpu: TorchGpu
    name: str = "standin"
    dtype: torch.dtype = torch.bfloat16
    kernel: str = "standin 1.0"
    factor: float = 1.0
    fails: str = ""

    def missing(self):
        return None

    def refusal(self, bits, n, k, group):
        return None if bits == 4 else "it takes 4 bits"

    def prepare(self, weight):
        if self.fails == "prepare":
            raise ValueError("no such layout\nand more")
        matrix = (self.factor * weight.dequantise(torch.float32)).to(self.dtype)

        def run(x):
            assert x.dtype == self.dtype
            if self.fails == "run" and len(x) > 1:
                raise NotImplementedError
            self.gpu.now += 20.0
            return x @ matrix.T

        return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> TorchGpu:
    found = TorchGpu(l2_bytes=1)
    use_torch(monkeypatch, found, lambda *_: 10.0)
    return found


def rows_against(monkeypatch, gpu, *standins, table=ARTICLE, **params) -> tuple[list[dict], list[str]]:
    said: list[str] = []
    monkeypatch.setattr(kernel_peers, "find", lambda names: list(standins))
    rows = list(peer_rows(complete(KERNEL_PEERS, {**SMALL, **params}), gpu, table, said.append))
    for row in rows:
        assert set(row) == KEYS
        check_row(row, "row")
        assert len(row["time_us"]) == 21
    return rows, said


def test_ours_as_dispatched_cublas_and_peers(gpu, monkeypatch):
    table = (*ARTICLE, Row(4, 2, 5, "w4_tiled_gemm_split_k", 8, 64))
    rows, said = rows_against(monkeypatch, gpu, StandIn(gpu), table=table)
    assert [(r["peer"], r["bits"], r["m"], r["group"], r["kernel"]) for r in rows] == [
        (CUBLAS, 16, 1, None, "cublas_fp16"),
        (CUBLAS, 16, 3, None, "cublas_fp16"),
        (OURS, 4, 1, 32, "w4_gemv"),
        ("standin", 4, 1, 32, "standin 1.0"),
        (OURS, 4, 3, 32, "w4_tiled_gemm_split_k"),
        ("standin", 4, 3, 32, "standin 1.0"),
        (OURS, 3, 1, 32, "w3_gemv"),
        (OURS, 3, 3, 32, "w3_gemv_grid_y"),
    ]
    assert {r["peer"]: round(median_us(r)) for r in rows} == {CUBLAS: 0, OURS: 10, "standin": 20}
    assert all(r["correct"] for r in rows)
    errors = {r["peer"]: r["rel_err"] for r in rows}
    assert 0 < errors[OURS] < 1e-3 < errors["standin"] < 5e-3  # float16 and bfloat16
    assert said == ["standin left out, W3, N x K = 8 x 64: it takes 4 bits"]
    assert gpu.rests == 3  # before each weight


def test_every_kernel_of_ours(gpu, monkeypatch):
    rows, _ = rows_against(monkeypatch, gpu, bits=[4], m=[3], all_kernels=True)
    assert [r["kernel"] for r in rows if r["peer"] == OURS] == cells.kernels_for(4, 3)


def test_a_wrong_peer_has_a_row_that_says_so(gpu, monkeypatch):
    rows, _ = rows_against(monkeypatch, gpu, StandIn(gpu, factor=1.1), bits=[4], m=[1])
    assert [r["correct"] for r in rows] == [True, True, False]
    assert rows[-1]["rel_err"] == pytest.approx(0.1, abs=0.01)


def test_peers_that_fail_are_named_and_the_others_are_measured(gpu, monkeypatch):
    broken = StandIn(gpu, name="broken", kernel="broken 2", fails="prepare")
    moody = StandIn(gpu, name="moody", kernel="moody 3", fails="run")
    rows, said = rows_against(monkeypatch, gpu, broken, moody, StandIn(gpu), bits=[4])
    assert [(r["peer"], r["m"]) for r in rows if r["bits"] == 4] == [
        (OURS, 1), ("moody", 1), ("standin", 1), (OURS, 3), ("standin", 3),
    ]  # fmt: skip
    assert said == [
        "broken left out, W4, N x K = 8 x 64: ValueError: no such layout",
        "moody moody 3 left out, W4, M x N x K = 3 x 8 x 64: NotImplementedError: no message",
    ]


def test_a_refusal_of_ours_is_said_and_a_fault_of_ours_is_raised(gpu, monkeypatch):
    for error in (KernelError("w4_gemv: N = 8 is odd"), RuntimeError("misaligned")):

        def fails(*_args, error=error, **_more):
            raise error

        monkeypatch.setitem(cells.LAUNCHERS, "w4_gemv", fails)
        if isinstance(error, RuntimeError):
            with pytest.raises(RuntimeError, match="misaligned"):
                rows_against(monkeypatch, gpu, bits=[4], m=[1])
            continue
        rows, said = rows_against(monkeypatch, gpu, bits=[4], m=[1])
        assert [r["peer"] for r in rows] == [CUBLAS]
        assert said == [
            "deepinfer_lab w4_gemv left out, W4, M x N x K = 1 x 8 x 64: KernelError: w4_gemv: N = 8 is odd"
        ]


def test_the_experiment_asks_for_what_was_published():
    from deepinfer_lab.lab import published

    cells_of = published.table("gemm", published.PEERS_FILE)
    assert {tuple(shape) for shape in KERNEL_PEERS.defaults["shapes"]} == set(
        zip(cells_of["n"], cells_of["k"], strict=True)
    )
    assert set(KERNEL_PEERS.defaults["m"]) == set(cells_of["m"])
    assert KERNEL_PEERS.defaults["group"] == published.PEERS_GROUP
    assert not KERNEL_PEERS.runs_on_cpu


def test_a_table_that_tune_has_left_goes_before_the_published_one(home, monkeypatch):
    monkeypatch.setattr(kernel_dispatch.provenance, "device_slug", lambda: "card")
    assert kernel_dispatch.newest_table() is None
    for folder in (home / "data" / "card", home / "build" / "data" / "card"):
        folder.mkdir(parents=True)
        (folder / "dispatch.json").write_text("{}")
        assert kernel_dispatch.newest_table() == folder / "dispatch.json"
