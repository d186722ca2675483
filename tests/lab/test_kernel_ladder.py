"""The ladder with torch for a GPU, and its predictions against counts by hand."""

import math
from dataclasses import replace

import pytest
from torch_gpu import BANDWIDTH, TorchGpu, use_torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import dispatch, maps, mma_block
from deepinfer_lab.kernels.catalogue import TILED
from deepinfer_lab.lab import kernel_cells as cells
from deepinfer_lab.lab.experiment import complete
from deepinfer_lab.lab.kernel_ladder import KERNEL_LADDER, card_of, clock_hz, ladder_rows, rungs
from deepinfer_lab.lab.kernel_ladder_model import GEMV, Card, Cell, predict
from deepinfer_lab.lab.kernel_peers import CUBLAS, OURS
from deepinfer_lab.lab.record import Record, check_row

KEYS = {
    "peer",
    "bits",
    "m",
    "n",
    "k",
    "group",
    "kernel",
    "time_us",
    "rel_err",
    "floor_us",
    "correct",
    "predicted_us",
    "bound",
}
SMALL = {"shapes": [[16, 128]], "bits": [4, 3], "m": [1, 9], "group": 32, "square": 32}
ORIGIN = {"device": "d", "device_slug": "d", "utc": "now", "multiprocessors": 132, "clocks": {"sm_max_mhz": 1980.0}}
CARD = Card(bytes_per_s=4e12, flops_per_s=8e14, launch_us=1.0, multiprocessors=100, hertz=1e9)
WEIGHT = {"n": 4096, "k": 8192, "group": 128}


# --- rungs and rows ---


def test_the_article_s_kernel_for_so_many_rows_is_a_rung_and_tensor_cores_come_last():
    for bits in (4, 3):
        for m in (1, 8, 9, 300):
            names = rungs(bits, m)
            assert dispatch.choose(bits, m) in names
            tiled = [name for name, product in TILED.items() if product.bits == bits]
            assert names[-len(tiled) :] == tiled
            assert names[-len(tiled) - 1] == f"w{bits}_dequantise_cublas"
    assert not {"w4_tiled_gemm", "w4_gemv"} & set(rungs(4, 8))
    assert not any("gemv" in name for name in rungs(3, 9))
    assert rungs(16, 9) == [cells.DENSE]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> TorchGpu:
    found = TorchGpu(l2_bytes=1)
    use_torch(monkeypatch, found, lambda *_: 10.0)
    return found


def test_rows_say_what_was_measured_and_what_was_expected(gpu):
    said: list[str] = []
    rows = list(ladder_rows(complete(KERNEL_LADDER, SMALL), gpu, 132, 1.98e9, said.append))
    for row in rows:
        assert set(row) == KEYS
        check_row(row, "row")
        assert row["correct"]
    assert [(row["kernel"], row["m"], row["predicted_us"]) for row in rows[:2]] == [
        (cells.EMPTY, 1, None), (cells.DENSE, 32, None),
    ]  # fmt: skip
    expected = [(bits, m, name) for bits in (4, 3, 16) for m in (1, 9) for name in rungs(bits, m)]
    assert [(row["bits"], row["m"], row["kernel"]) for row in rows[2:]] == expected
    assert {row["peer"] for row in rows[2:]} == {OURS, CUBLAS}
    assert said == []
    card = card_of(Record("kernel_ladder", complete(KERNEL_LADDER, SMALL), ORIGIN, "OK", rows))
    assert card.bytes_per_s == pytest.approx(BANDWIDTH)
    assert (card.multiprocessors, card.hertz) == (132, 1.98e9)
    for row in rows[2:]:
        cell = Cell(row["bits"], row["m"], row["n"], row["k"], row["group"])
        again = predict(row["kernel"], cell, card)
        assert (again.us, again.bound) == (pytest.approx(row["predicted_us"]), row["bound"])


def test_a_kernel_that_the_card_does_not_take_is_said_and_left_out(gpu, monkeypatch):
    def refuses(*_args, **_more):
        raise KernelError("needs another card")

    monkeypatch.setitem(cells.TILED_LAUNCHERS, "w4_mma_block", refuses)
    said: list[str] = []
    rows = list(ladder_rows(complete(KERNEL_LADDER, {**SMALL, "m": [1]}), gpu, 132, 1.98e9, said.append))
    assert "w4_mma_block" not in {row["kernel"] for row in rows}
    assert "w3_mma_block" in {row["kernel"] for row in rows}
    assert said == [
        "deepinfer_lab w4_mma_block left out, W4, M x N x K = 1 x 16 x 128: KernelError: needs another card"
    ]


# --- predictions ---


def test_with_everything_else_endless_a_launch_and_one_reading_are_left():
    endless = replace(CARD, flops_per_s=math.inf, hertz=math.inf)
    for bits in (4, 3):
        for m in (1, 16, 256):
            read = WEIGHT["n"] * WEIGHT["k"] * (bits / 8 + 2 / 128) + 2 * m * (WEIGHT["n"] + WEIGHT["k"])
            dense = 2 * WEIGHT["n"] * WEIGHT["k"]
            for name in rungs(bits, m):
                launches, moved = 1 + ("split_k" in name), read
                if "dequantise" in name:  # written, and read again
                    launches, moved = 2, read + 2 * dense
                found = predict(name, Cell(bits, m, **WEIGHT), endless)
                assert (found.us, found.bound) == (pytest.approx(launches + moved / 4e6), "memory"), name


def test_gemv_counts_instructions_by_weight_and_row():
    weights = WEIGHT["n"] * WEIGHT["k"]
    for name, (decode, row) in GEMV.items():
        found = predict(name, Cell(int(name[1]), 1, **WEIGHT), CARD)
        assert found.us == pytest.approx(1 + weights * (decode + row) / 32 / (4 * 100) / 1e3)
        assert found.bound == "instructions"
    decode, row = GEMV["w3_gemv_grid_y"]
    again = predict("w3_gemv_grid_y", Cell(3, 8, **WEIGHT), CARD).us
    shared = predict("w3_gemv_warp_tile", Cell(3, 8, **WEIGHT), CARD).us
    assert (again - 1) / (shared - 1) == pytest.approx(8 * (decode + row) / (decode + 8 * row))


def test_tiles_wait_for_the_busiest_multiprocessor():
    """64 blocks of 64 outputs on 100 multiprocessors; their K split, 512 blocks on 6 rounds of an eighth."""
    whole = predict("w4_tiled_gemm", Cell(4, 32, **WEIGHT), CARD)
    turns = sum(read.turns for read in maps.wide()) / maps.BK
    issued = (len(maps.wide()) / maps.BK + 6 + 8) / 4
    assert whole.us == pytest.approx(1 + WEIGHT["k"] * 8 * max(turns, issued) / 1e3)
    split = predict("w4_tiled_gemm_split_k", Cell(4, 32, **WEIGHT), CARD)
    assert (split.us - 2) / (whole.us - 1) == pytest.approx(6 / 8)
    assert predict("w4_tiled_gemm", Cell(4, 33, **WEIGHT), CARD).us == pytest.approx(2 * whole.us - 1)


def test_many_rows_are_a_matter_of_tensor_cores():
    cell = Cell(4, 128, **WEIGHT)
    found = predict("w4_mma_block", cell, CARD)
    products = 4096 / 16 * 8192 / 16 * 128 / 8
    assert (found.us, found.bound) == (pytest.approx(1 + products * mma_block.PRODUCT / 100 / 1e3), "tensor cores")
    flops = 2 * 128 * 4096 * 8192
    slow = replace(CARD, flops_per_s=1e14)
    for name, its in (("cublas_fp16", replace(cell, bits=16, group=None)), ("w4_of_tomorrow", cell)):
        found = predict(name, its, slow)  # a kernel without a model of its own has the roofline
        assert (found.us, found.bound) == (pytest.approx(1 + flops / 1e8), "tensor cores")


def test_more_rows_never_cost_less():
    for bits in (4, 3):
        for name in {*rungs(bits, 8), *rungs(bits, 16)} - {f"w{bits}_gemv"}:
            times = [
                predict(name, Cell(bits, m, **WEIGHT), CARD).us for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 200, 2048)
            ]
            assert times == sorted(times), name


def test_an_unknown_clock_sets_no_limit():
    assert clock_hz(ORIGIN) == 1.98e9
    card = replace(CARD, hertz=clock_hz({"clocks": {}}))
    assert predict("w4_gemv", Cell(4, 1, **WEIGHT), card).bound == "memory"
