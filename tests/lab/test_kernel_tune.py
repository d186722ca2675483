"""Tuning: which kernels are timed, what becomes of the times, and how tables are merged, on a GPU made of torch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch_gpu import TorchGpu, use_torch

from deepinfer_lab.errors import KernelError, QuantisationError, RecordError
from deepinfer_lab.kernels import dispatch
from deepinfer_lab.kernels.dispatch import FALLBACK, Row, choose
from deepinfer_lab.lab import kernel_cells as cells
from deepinfer_lab.lab import kernel_tune
from deepinfer_lab.lab.kernel_tune import Timing, table_from, timings

ORIGIN = {"device": "NVIDIA Test", "utc": "2026-01-02T03:04:05+00:00", "commit": "abc"}
Costs = dict[str, Callable[[int], float]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> TorchGpu:
    """Every launcher takes 50 microseconds, the fallback 1000."""
    found = TorchGpu(l2_bytes=1)  # two copies are enough
    set_costs(monkeypatch, found, {})
    return found


def set_costs(monkeypatch: pytest.MonkeyPatch, gpu: TorchGpu, costs: Costs, **factors: float) -> None:
    def cost(name: str, m: int) -> float:
        return costs[name](m) if name in costs else 50.0

    use_torch(monkeypatch, gpu, cost, 1000.0, factors)


def times_of(found: list[Timing], kernel: str) -> dict[int, float | None]:
    return {timing.m: timing.us for timing in found if timing.kernel == kernel}


def test_every_candidate_is_timed_at_every_m(gpu: TorchGpu):
    found = list(timings(gpu, [(8, 64), (6, 128)], [4, 3], (2, 1), group=64))
    assert {(t.bits, t.m, t.n, t.k, t.kernel) for t in found} == {
        (bits, m, n, k, kernel)
        for n, k in ((8, 64), (6, 128))
        for bits in (4, 3)
        for m in (1, 2)
        for kernel in cells.kernels_for(bits, m)
        if kernel != FALLBACK
    }
    assert len(found) == len({(t.bits, t.m, t.n, t.kernel) for t in found})
    for t in found:
        assert t.fault is None
        assert t.us == pytest.approx(50, abs=0.01)
        assert 0 < t.rel_err < 1e-3
        assert t.group == 64
        assert t.floor_us > 0


def test_slow_kernels_whose_time_grows_are_given_up_and_slow_ones_that_do_not_are_kept(gpu, monkeypatch):
    set_costs(
        monkeypatch,
        gpu,
        {
            "w4_gemv_batch_tile": lambda m: 60.0 * m,  # over 4 times the best from M = 4 on, and growing
            "w4_dequantise_cublas": lambda m: 900.0 if m < 64 else 20.0,  # slow, but for one row as for eight
            "w4_tiled_gemm": lambda m: 190.0 * m**0.6,  # below four times the best at M = 1, above from then on
        },
    )
    found = list(timings(gpu, [(24, 256)], [4], (1, 2, 4, 8, 64), group=64))
    assert list(times_of(found, "w4_gemv_batch_tile")) == [1, 2, 4]
    assert list(times_of(found, "w4_tiled_gemm")) == [1, 2]
    assert list(times_of(found, "w4_dequantise_cublas")) == [1, 2, 4, 8, 64]
    assert FALLBACK not in {timing.kernel for timing in found}
    table = table_from(found)
    assert choose(4, 64, table=table, n=24, k=256) == "w4_dequantise_cublas"


def test_what_is_given_up_for_one_shape_is_tried_on_the_next(gpu, monkeypatch):
    set_costs(monkeypatch, gpu, {"w4_gemv_batch_tile": lambda m: 300.0 * m})
    found = list(timings(gpu, [(24, 256), (16, 128)], [4], (1, 2, 4), group=64))
    assert [(t.n, t.m) for t in found if t.kernel == "w4_gemv_batch_tile"] == [(24, 1), (24, 2), (16, 1), (16, 2)]


def test_wrong_and_refusing_kernels_are_named_not_timed_and_not_chosen(gpu, monkeypatch):
    set_costs(monkeypatch, gpu, {"w4_gemv": lambda m: 1.0, "w4_tiled_gemm": lambda m: 1.0}, w4_gemv=1.01)

    def refuses(x, packed, scales, group, bias=None, out=None):
        raise KernelError("w4_tiled_gemm: N = 24, must be another")

    monkeypatch.setitem(cells.LAUNCHERS, "w4_tiled_gemm", refuses)
    before = gpu.now
    found = list(timings(gpu, [(24, 256)], [4], (1, 2), group=64))
    faults = {t.kernel: (t.us, t.fault) for t in found if t.fault and t.m == 1}
    assert faults == {
        "w4_gemv": (None, "wrong: relative error 1.0e-02, allowed is 2e-03"),
        "w4_tiled_gemm": (None, "w4_tiled_gemm: N = 24, must be another"),
    }
    assert gpu.now > before
    assert {row.kernel for row in table_from(found)}.isdisjoint(faults)


def test_a_group_that_does_not_divide_k_is_refused(gpu: TorchGpu):
    with pytest.raises(QuantisationError, match="K = 96 is not a multiple of group 64"):
        list(timings(gpu, [(24, 96)], [4], (1,), group=64))


# --- tables ---


def timing(kernel: str, us: float | None, m: int = 1, n: int = 24, k: int = 256) -> Timing:
    return Timing(int(kernel[1]), m, n, k, 64, kernel, us, 1.0, 1e-4, None if us else "wrong")


def test_each_shape_gets_rows_of_its_own_and_all_together_the_general_ones():
    found = [
        timing("w4_gemv", 10), timing("w4_tiled_gemm", 30),
        timing("w4_gemv_batch_tile", 20, m=8), timing("w4_tiled_gemm", 30, m=8),
        timing("w4_gemv", 40, n=99), timing("w4_tiled_gemm", 30, n=99),
        timing("w4_gemv_batch_tile", 90, 8, 99), timing("w4_tiled_gemm", 30, 8, 99),
    ]  # fmt: skip
    assert table_from(found) == (
        Row(4, 1, 1, "w4_gemv"),  # sqrt(10 * 40) against 30
        Row(4, 2, None, "w4_tiled_gemm"),  # sqrt(20 * 90) against 30
        Row(4, 1, 1, "w4_gemv", 24, 256),
        Row(4, 2, None, "w4_gemv_batch_tile", 24, 256),
        Row(4, 1, None, "w4_tiled_gemm", 99, 256),
    )


def test_a_kernel_must_gain_three_percent_to_displace_a_simpler_one():
    for fast, expected in ((98.0, "w4_gemv_batch_tile"), (96.0, "w4_tiled_gemm")):
        found = [
            timing(kernel, us, m)
            for m in (1, 2)
            for kernel, us in (("w4_tiled_gemm", fast), ("w4_gemv_batch_tile", 100.0))
        ]
        assert {row.kernel for row in table_from(found)} == {expected}


def test_what_was_not_timed_stays():
    base = (
        Row(4, 1, None, FALLBACK), Row(3, 1, None, "w3_tiled_gemm"),
        Row(4, 1, 4, FALLBACK, 24, 256), Row(4, 1, 1, "w4_gemv", 7, 64), Row(3, 1, 1, "w3_gemv", 24, 256),
    )  # fmt: skip
    both = [timing("w4_tiled_gemm", 5, m, n) for n in (24, 99) for m in (1, 2)]
    assert set(table_from(both, base)) == {
        Row(4, 1, None, "w4_tiled_gemm"), base[1],
        Row(4, 1, None, "w4_tiled_gemm", 24, 256), Row(4, 1, None, "w4_tiled_gemm", 99, 256), base[3], base[4],
    }  # fmt: skip
    # One shape says little about others.
    assert set(table_from(both[:2], base)) == {
        base[0],
        base[1],
        Row(4, 1, None, "w4_tiled_gemm", 24, 256),
        base[3],
        base[4],
    }
    assert table_from(both[:2])[0] == Row(4, 1, None, "w4_tiled_gemm")


def test_times_that_make_no_table():
    with pytest.raises(RecordError, match="no correct row"):
        table_from([timing("w4_gemv", None)])
    with pytest.raises(RecordError, match="begin at M = 2"):
        table_from([timing("w4_tiled_gemm", 5, m=2)])
    with pytest.raises(RecordError, match="of M = 1 alone"):
        table_from([timing("w4_gemv", 5)])
    with pytest.raises(RecordError, match="M = 1: no kernel has a correct result on all 2 shapes"):
        table_from(
            [timing("w4_tiled_gemm", 5, m) for m in (1, 2)]
            + [timing("w4_gemv", 5, n=99), timing("w4_tiled_gemm", 5, 2, 99)]
        )


def test_a_written_table_is_read_again_and_by_its_device_alone(tmp_path: Path):
    path = tmp_path / "dispatch.json"
    assert kernel_tune.read_base(path, "NVIDIA Test") == ()
    both = [timing("w4_tiled_gemm", 5), timing("w4_tiled_gemm", 5, m=2)]
    table = table_from([*both, timing("w3_gemv", 5), timing("w3_tiled_gemm", 5, m=2)])
    kernel_tune.write_table(path, table, ORIGIN)
    assert dispatch.load(path) == kernel_tune.read_base(path, "NVIDIA Test") == table
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["device"], content["measured"], content["schema_version"]) == ("NVIDIA Test", ORIGIN["utc"], 2)
    assert {len(row) for row in content["rows"]} == {4, 6}
    with pytest.raises(RecordError, match="is the table of 'NVIDIA Test', and this is 'NVIDIA Other'"):
        kernel_tune.read_base(path, "NVIDIA Other")
    path.write_text(path.read_text(encoding="utf-8").replace("w4_gemv", "w4_gone").replace("w4_tiled_gemm", "w4_gone"))
    assert kernel_tune.read_base(path, "NVIDIA Test") == tuple(row for row in table if row.bits == 3)
    path.write_text("{")
    with pytest.raises(KernelError, match="not a dispatch table"):
        kernel_tune.read_base(path, "NVIDIA Test")


def test_tuning_twice_changes_nothing():
    found = [
        timing(kernel, us + n, m, n)
        for n in (24, 99)
        for m in (1, 8)
        for kernel, us in (("w4_tiled_gemm", 5), ("w4_gemv_batch_tile", 9 * m), ("w3_tiled_gemm", 7))
    ]
    table = table_from(found)
    assert table_from(found, table) == table
    assert table_from([replace(t, us=2 * t.us) for t in found], table) == table
