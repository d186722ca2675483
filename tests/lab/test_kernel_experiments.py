"""Timing, cells, experiments and the derived dispatch table, with torch for a GPU and a clock that only launches move."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch_gpu import BANDWIDTH, TorchGpu, use_torch

from deepinfer_lab.errors import RecordError, SettingError
from deepinfer_lab.kernels import LAUNCHERS
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.lab import kernel_cells as cells
from deepinfer_lab.lab import kernel_dispatch, kernel_timing
from deepinfer_lab.lab.experiment import complete
from deepinfer_lab.lab.kernel_experiments import TILED_GEMM, W3_BATCH_TILE, tiled_gemm_rows, w3_batch_tile_rows
from deepinfer_lab.lab.kernel_timing import ARTICLE, GRAPH_COLD
from deepinfer_lab.lab.record import Record, check_row
from deepinfer_lab.quant.layout import PackedWeight, packed_columns
from deepinfer_lab.quant.linear import dequant_cublas

KEYS = {"bits", "m", "n", "k", "group", "kernel", "method", "time_us", "rel_err", "floor_us", "correct"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> TorchGpu:
    """Launchers that compute with torch, at 10 microseconds and one more for each row."""
    found = TorchGpu()
    use_torch(monkeypatch, found, lambda _, m: 10 + m)
    return found


# --- timing ---


def test_copies_exceed_four_times_the_l2_and_are_two_at_least():
    assert kernel_timing.copies_for(l2_bytes=50, nbytes=10) == 21
    assert kernel_timing.copies_for(l2_bytes=50, nbytes=60) == 4
    assert kernel_timing.copies_for(l2_bytes=50, nbytes=1000) == 2


def test_graph_cold_launches_every_copy_once_a_replay_and_divides():
    gpu = TorchGpu()
    samples = kernel_timing.graph_cold(gpu, gpu.launch(7.0), copies=3, replays=20)
    assert len(samples) == 20
    assert samples == pytest.approx([7.0] * 20, abs=1e-3)
    assert gpu.launched == [0, 1, 2] * (1 + 3 + 20)  # captured, warmed up, measured
    with pytest.raises(SettingError, match="replays = 19"):
        kernel_timing.graph_cold(gpu, gpu.launch(7.0), copies=3, replays=19)


def test_article_times_twenty_launches_of_one_copy_after_three():
    gpu = TorchGpu()
    samples = kernel_timing.article(gpu, gpu.launch(7.0))
    assert samples == pytest.approx([7.0] * 20, abs=2e-3)
    assert gpu.launched == [0] * 23


# --- cells ---


def test_kernels_for_an_m():
    assert cells.kernels_for(4, 1) == [
        "w4_gemv",
        "w4_gemv_batch_tile",
        "w4_tiled_gemm",
        "w4_tiled_gemm_split_k",
        "w4_dequantise_cublas",
        "w4_mma_small",
        "w4_mma_block",
        "w4_wide",
        FALLBACK,
    ]
    assert cells.kernels_for(3, 9) == [
        "w3_gemv_grid_y", "w3_gemv_batch_tile", "w3_gemv_warp_tile", "w3_tiled_gemm", "w3_tiled_gemm_split_k",
        "w3_dequantise_cublas", "w3_mma_small", "w3_mma_block", "w3_wide", FALLBACK,
    ]  # fmt: skip
    assert cells.kernels_for(16, 512) == [cells.DENSE]


@pytest.mark.parametrize("bits", [3, 4, 16])
def test_random_matrix_is_cold_and_its_copies_differ(gpu: TorchGpu, bits: int):
    matrix = cells.random_matrix(gpu, torch.Generator().manual_seed(0), bits, n=24, k=256, group=64)
    assert sum(copy.nbytes for copy in matrix.copies) > 4 * gpu.l2_bytes
    values = [copy if bits == 16 else copy.packed for copy in matrix.copies]
    assert not torch.equal(values[0], values[1])
    expected = 24 * 256 * 2 if bits == 16 else 24 * packed_columns(256, bits) + 24 * 4 * 2
    assert matrix.copies[0].nbytes == expected
    assert matrix.group == (None if bits == 16 else 64)
    # in microseconds: weights, 5 x 256 activations, 5 x 24 outputs, over bytes per second
    assert cells.floor_us(matrix, 5, BANDWIDTH) == pytest.approx((expected + 5 * 256 * 2 + 5 * 24 * 2) / 1e3)


def measured(gpu: TorchGpu, bits: int, m: int, kernels: list[str], methods=(GRAPH_COLD,)) -> list[dict]:
    random = torch.Generator().manual_seed(1)
    matrix = cells.random_matrix(gpu, random, bits, n=24, k=256, group=64)
    return list(cells.measure(gpu, random, matrix, m, kernels, methods, BANDWIDTH))


@pytest.mark.parametrize("bits", [3, 4, 16])
def test_every_kernel_is_checked_and_timed(gpu: TorchGpu, bits: int):
    rows = measured(gpu, bits, 3, cells.kernels_for(bits, 3), [GRAPH_COLD, ARTICLE])
    assert [(row["kernel"], row["method"]) for row in rows] == [
        (kernel, method) for kernel in cells.kernels_for(bits, 3) for method in (GRAPH_COLD, ARTICLE)
    ]
    for row in rows:
        assert set(row) == KEYS
        check_row(row, "row")
        assert row["correct"] is True
        assert 0 < row["rel_err"] < 1e-3  # float16 rounding, no more and no less
        assert len(row["time_us"]) >= 20
        if row["kernel"] in LAUNCHERS:
            assert row["time_us"] == pytest.approx([13.0] * len(row["time_us"]), abs=0.01)


def test_a_wrong_result_and_one_that_is_not_written_are_not_correct(gpu: TorchGpu, monkeypatch: pytest.MonkeyPatch):
    def doubled(x, packed, scales, group, bias=None, out=None):
        return out.copy_(2 * dequant_cublas(x.float(), PackedWeight(4, group, len(packed), x.shape[1], packed, scales)))

    def lazy(x, packed, scales, group, bias=None, out=None):
        doubled(x, packed, scales, group, out=torch.empty_like(out))
        return out

    for launcher, expected in ((doubled, pytest.approx(1.0, abs=1e-3)), (lazy, None)):
        monkeypatch.setattr(cells, "LAUNCHERS", {"w4_tiled_gemm": launcher})
        (row,) = measured(gpu, 4, 3, ["w4_tiled_gemm"])
        assert row["correct"] is False
        assert row["rel_err"] == expected
        check_row(row, "row")  # no NaN in a record


def test_unknown_kernels_methods_and_tf32_are_refused(gpu: TorchGpu):
    with pytest.raises(SettingError, match="kernel 'w5'"):
        measured(gpu, 4, 1, ["w5"])
    with pytest.raises(SettingError, match="method 'guess'"):
        measured(gpu, 4, 1, ["w4_gemv"], ["guess"])
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with pytest.raises(SettingError, match="allow_tf32"):
            measured(gpu, 4, 1, ["w4_gemv"])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_summary_is_the_median_cold_and_the_mean_of_the_articles_method():
    times = [1.0, 2.0, 3.0, 10.0]
    frame = Record("x", {}, {}, "OK", [{"method": m, "time_us": times} for m in (GRAPH_COLD, ARTICLE)]).frame()
    assert cells.summary(frame)["us"].tolist() == [2.5, 4.0]
    assert cells.summary(frame)["spread"].tolist() == pytest.approx([(4.75 - 1.75) / 2.5] * 2)
    assert "time_us" in frame  # the caller's table is left alone


# --- experiments ---

SMALL = {
    "article_shapes": [[4, 30, 24, 256], [3, 30, 40, 128]],
    "sweep_shapes": [[24, 256], [16, 128]],
    "sweep_m": [1, 2, 9],
}


def rows_of_tiled_gemm(gpu: TorchGpu) -> Iterator[dict]:
    return tiled_gemm_rows(complete(TILED_GEMM, SMALL), gpu)


def test_tiled_gemm_measures_the_articles_shapes_then_the_sweep(gpu: TorchGpu):
    rows = list(rows_of_tiled_gemm(gpu))
    assert all(row["correct"] for row in rows)
    assert [row["kernel"] for row in rows[:1]] == [cells.EMPTY]
    assert {(r["bits"], r["kernel"], r["n"], r["method"]) for r in rows[1:17]} == {
        (bits, kernel, n, method)
        for few, n in ((4, 24), (3, 40))
        for bits, kernel in (
            (few, f"w{few}_tiled_gemm"),
            (few, f"w{few}_tiled_gemm_split_k"),
            (few, FALLBACK),
            (16, cells.DENSE),
        )
        for method in (GRAPH_COLD, ARTICLE)
    }
    assert all(row["m"] == 30 for row in rows[1:17])
    swept = {(r["bits"], r["m"], r["n"], r["k"], r["kernel"]) for r in rows[17:]}
    assert swept == {
        (bits, m, n, k, kernel)
        for n, k in SMALL["sweep_shapes"]
        for bits in (3, 4, 16)
        for m in SMALL["sweep_m"]
        for kernel in cells.kernels_for(bits, m)
    }
    assert len(rows[17:]) == len(swept)


def test_rows_arrive_while_measuring_goes_on(gpu: TorchGpu):
    """An interruption keeps the finished rows: none waits for a later one."""
    rows = rows_of_tiled_gemm(gpu)
    next(rows)
    before = gpu.now
    row = next(rows)
    # One check, then 6 copies in each of a capture, 3 warm-ups and 21 replays, at 40 microseconds each: that cell alone.
    assert (row["kernel"], row["method"]) == ("w4_tiled_gemm", GRAPH_COLD)
    assert gpu.now - before == pytest.approx(40 * (1 + 6 * (1 + 3 + 21)), abs=1)


def test_default_experiments_ask_for_the_articles_shapes_and_as_many_rows_as_they_say():
    shapes = {tuple(shape) for shape in TILED_GEMM.defaults["article_shapes"]}
    sweep = [(b, m) for b in (3, 4, 16) for m in TILED_GEMM.defaults["sweep_m"]]
    assert shapes == {(r["weight_bits"], r["m"], r["n"], r["k"]) for r in published("2.7")}
    assert 1 + 8 * len(shapes) + 2 * sum(len(cells.kernels_for(b, m)) for b, m in sweep) == 41 + 422
    assert {(r["n"], r["k"]) for r in published("3.2")} <= {tuple(s) for s in W3_BATCH_TILE.defaults["shapes"]}
    assert {r["batch"] for r in published("3.2")} <= set(W3_BATCH_TILE.defaults["batch"])
    assert not TILED_GEMM.runs_on_cpu
    assert not W3_BATCH_TILE.runs_on_cpu


def published(section: str) -> list[dict]:
    path = Path(__file__).parents[2] / "data" / "published" / "deepinfer_sm86_part7.json"
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    return next(table["rows"] for table in tables if table["section"] == section)


def test_w3_batch_tile_measures_three_kernels_by_both_methods(gpu: TorchGpu):
    params = complete(W3_BATCH_TILE, {"shapes": [[24, 256]], "batch": [1, 8]})
    rows = list(w3_batch_tile_rows(params, gpu))
    assert rows[0]["kernel"] == cells.EMPTY
    assert [(r["m"], r["kernel"], r["method"]) for r in rows[1:]] == [
        (m, kernel, method)
        for m in (1, 8)
        for kernel in ("w3_gemv_grid_y", "w3_gemv_batch_tile", "w3_gemv_warp_tile")
        for method in (GRAPH_COLD, ARTICLE)
    ]
    assert all(set(row) == KEYS and row["correct"] for row in rows)


# --- dispatch ---

ORIGIN = {"device": "NVIDIA Test", "device_slug": "nvidia-test", "utc": "2026-01-02T03:04:05+00:00"}


def record_of(cost: Callable[[str, int, int], float], m=(1, 2, 8, 9, 64), status="OK", **extra) -> Record:
    """A sweep in which every kernel takes `cost(kernel, m, n)` microseconds."""
    params = complete(TILED_GEMM, {"sweep_m": list(m)})
    samples = [
        {"bits": bits, "m": rows, "n": n, "k": k, "kernel": kernel, "method": GRAPH_COLD, "correct": True,
         "time_us": [cost(kernel, rows, n)] * 20, **extra}
        for n, k in params["sweep_shapes"]
        for bits in (4, 3, 16)
        for rows in m
        for kernel in cells.kernels_for(bits, rows)
    ]  # fmt: skip
    return Record("tiled_gemm", params, dict(ORIGIN), status, samples)


def crossing(kernel: str, m: int, n: int) -> float:
    """GEMV pays by the row, the tile by the 32 rows, the fallback once; dense cuBLAS is always the fastest."""
    if kernel == cells.DENSE:
        return 0.1
    if kernel == FALLBACK:
        return 1000.0
    if "tiled" in kernel:
        return 100.0 * -(-m // 32)
    return {"w4_gemv": 9, "w3_gemv": 9, "w4_gemv_batch_tile": 10, "w3_gemv_grid_y": 20}.get(kernel, 40) * m


def test_dispatch_takes_the_fastest_few_bit_kernel_by_m():
    assert kernel_dispatch.derive_dispatch(record_of(crossing)) == (
        Row(4, 1, 1, "w4_gemv"),
        Row(4, 2, 9, "w4_gemv_batch_tile"),
        Row(4, 10, None, "w4_tiled_gemm"),
        Row(3, 1, 1, "w3_gemv"),
        Row(3, 2, 2, "w3_gemv_grid_y"),
        Row(3, 3, None, "w3_tiled_gemm"),
    )


def test_dispatch_weighs_shapes_by_ratio_and_can_choose_the_fallback():
    def cost(kernel: str, m: int, n: int) -> float:
        if kernel == FALLBACK:  # half the time on one shape, a little more on the other, which is the larger
            return 50.0 if n == 5632 else 1100.0
        return 100.0 if n == 5632 else 1000.0

    rows = kernel_dispatch.derive_dispatch(record_of(cost))
    assert rows == (Row(4, 1, None, FALLBACK), Row(3, 1, None, FALLBACK))


def test_a_tie_keeps_the_kernel_in_use_and_otherwise_takes_the_simplest():
    def cost(kernel: str, m: int, n: int) -> float:
        fast = {"w4_gemv_batch_tile": 96.5, "w4_tiled_gemm": 96.0 if m < 64 else 93.0}
        return fast.get(kernel, 100.0)

    rows = kernel_dispatch.derive_dispatch(record_of(cost))
    assert [row for row in rows if row.bits == 4] == [
        Row(4, 1, 9, "w4_gemv_batch_tile"),  # w4_gemv takes over 3% longer than the fastest, and this one does not
        Row(4, 10, None, "w4_tiled_gemm"),
    ]
    assert [row for row in rows if row.bits == 3] == [Row(3, 1, 1, "w3_gemv"), Row(3, 2, None, "w3_gemv_grid_y")]


def test_a_kernel_that_was_wrong_on_one_shape_is_not_dispatched():
    record = record_of(crossing, status="INCORRECT")
    for row in record.samples:
        if row["kernel"] == "w4_gemv_batch_tile" and row["n"] == 5632:
            row["correct"] = False
    kernels = {row.kernel for row in kernel_dispatch.derive_dispatch(record)}
    assert "w4_gemv_batch_tile" not in kernels
    assert "w4_tiled_gemm" in kernels
    with pytest.raises(RecordError, match="no correct row"):
        kernel_dispatch.derive_dispatch(record_of(crossing, correct=False, status="INCORRECT"))


def test_dispatch_refuses_other_and_unfinished_records():
    with pytest.raises(RecordError, match="status TIMEOUT"):
        kernel_dispatch.derive_dispatch(record_of(crossing, status="TIMEOUT"))
    with pytest.raises(RecordError, match="w3_batch_tile, status OK"):
        kernel_dispatch.derive_dispatch(Record("w3_batch_tile", {}, dict(ORIGIN), "OK", []))
    with pytest.raises(RecordError, match="begin at M = 2"):
        kernel_dispatch.derive_dispatch(record_of(crossing, m=(2, 9)))


def test_the_experiments_own_rows_lead_to_a_table(gpu: TorchGpu):
    """From measuring to the table, on small shapes: here all launchers cost the same, and the fallback nothing."""
    rows = list(rows_of_tiled_gemm(gpu))
    record = Record("tiled_gemm", complete(TILED_GEMM, SMALL), dict(ORIGIN), "OK", rows)
    assert kernel_dispatch.derive_dispatch(record) == (Row(4, 1, None, FALLBACK), Row(3, 1, None, FALLBACK))
