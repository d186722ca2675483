"""`tune` and `bench kernels` from the outside, with torch for a GPU."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch_gpu import TorchGpu, use_torch

from deepinfer_lab.cli import bench_kernels, main
from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import dispatch
from deepinfer_lab.kernels.dispatch import Row
from deepinfer_lab.lab import kernel_peers, kernel_timing, kernel_tune, provenance
from deepinfer_lab.lab.kernel_peers import KERNEL_PEERS

ORIGIN = {
    "device": "NVIDIA Test", "device_slug": "nvidia-test", "utc": "2026-01-02T03:04:05+00:00", "commit": "abc", "torch": "2",
}  # fmt: skip
TUNE = ("tune", "--shape", "8x64", "--bits", "w4", "--m", "1,2,16")
OLD = (Row(4, 1, None, "w4_tiled_gemm_split_k"), Row(3, 1, None, "w3_tiled_gemm"), Row(4, 1, 1, "w4_gemv", 7, 64))


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch):
    """The commands on a GPU of torch: w4_gemv_batch_tile is the fastest up to 8 rows, then w4_tiled_gemm; w4_gemv is wrong."""
    gpu = TorchGpu(l2_bytes=1)

    def cost(name: str, m: int) -> float:
        if name == "w4_gemv_batch_tile":
            return 5.0 if m <= 8 else 50.0
        return {"w4_gemv": 1.0, "w4_tiled_gemm": 20.0}.get(name, 40.0)

    use_torch(monkeypatch, gpu, cost, 1000.0, {"w4_gemv": 1.5})
    monkeypatch.setattr(kernel_timing, "CudaGpu", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(provenance, "collect", lambda: ORIGIN)
    monkeypatch.setattr(provenance, "device_slug", lambda: "nvidia-test")
    monkeypatch.setattr(kernel_peers, "find", lambda names: [])

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(main, list(arguments), catch_exceptions=False)

    return command


def write_old(path: Path, device: str = "NVIDIA Test") -> None:
    rows = [{name: value for name, value in vars(row).items() if name not in "nk" or value} for row in OLD]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema_version": 2, "rows": rows, "device": device}))


def test_tune_says_what_it_chose_and_writes_it(run, home: Path):
    result = run(*TUNE)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("left out: w4_gemv, M x N x K = 1 x 8 x 64: wrong: relative error 5.0e-01")
    assert "W4, 8 x 64, group 64" in lines
    chosen = {int(line.split()[0]): line.split() for line in lines if line.strip() and line.split()[0].isdigit()}
    assert [words[1] for words in chosen.values()] == ["w4_gemv_batch_tile", "w4_gemv_batch_tile", "w4_tiled_gemm"]
    assert (chosen[1][2], chosen[1][4:]) == ("5.00", ["w4_tiled_gemm", "4.00x"])
    path = home.resolve() / "build" / "data" / "nvidia-test" / "dispatch.json"
    assert f"written: {path}" in result.output
    assert dispatch.load(path) == (
        Row(4, 1, 2, "w4_gemv_batch_tile"), Row(4, 3, None, "w4_tiled_gemm"),
        Row(4, 1, 2, "w4_gemv_batch_tile", 8, 64), Row(4, 3, None, "w4_tiled_gemm", 8, 64),
    )  # fmt: skip


def test_an_m_at_which_nothing_is_right_is_said(run, monkeypatch):
    bind = kernel_tune.launcher

    def refuses_two_rows(kernel: str, case):
        if case.x.shape[0] == 2:
            raise KernelError("too many rows")
        return bind(kernel, case)

    monkeypatch.setattr(kernel_tune, "launcher", refuses_two_rows)
    result = run(*TUNE)
    assert result.exit_code == 0
    assert "     2  nothing is right here" in result.output
    assert "M x N x K = 2 x 8 x 64: too many rows" in result.output


def test_defaults_are_those_of_the_measurements_behind():
    defaults = {option.name: option.default for option in main.commands["tune"].params}
    assert [int(m) for m in defaults["every_m"].split(",")] == list(kernel_tune.M_BUCKETS)
    shapes = {option.name: option.default for option in main.commands["bench"].commands["kernels"].params}["shapes"]
    assert [[int(size) for size in shape.split("x")] for shape in shapes.split(",")] == KERNEL_PEERS.defaults["shapes"]


def test_tune_merges_into_the_committed_table_then_into_its_own(run, home: Path):
    write_old(home / "data" / "nvidia-test" / "dispatch.json")
    new = {Row(4, 1, 2, "w4_gemv_batch_tile", 8, 64), Row(4, 3, None, "w4_tiled_gemm", 8, 64)}
    path = home / "build" / "data" / "nvidia-test" / "dispatch.json"
    assert run(*TUNE).exit_code == 0
    assert set(dispatch.load(path)) == {*OLD, *new}
    assert run("tune", "--model", "synthetic:tiny", "--bits", "w4", "--m", "1,2").exit_code == 0
    table = dispatch.load(path)
    assert {(row.n, row.k) for row in table if row.n} == {(7, 64), (8, 64), (128, 64), (64, 64), (256, 64), (64, 128)}
    assert Row(4, 1, None, "w4_gemv_batch_tile") in table  # four shapes say more than what was there
    assert OLD[1] in table
    assert dispatch.load(home / "data" / "nvidia-test" / "dispatch.json") == OLD


def test_tune_writes_where_it_is_told_and_refuses_another_cards_table(run, tmp_path: Path):
    mine, theirs = tmp_path / "mine.json", tmp_path / "theirs.json"
    assert run(*TUNE, "--output", str(mine)).exit_code == 0
    assert len(dispatch.load(mine)) == 4
    write_old(theirs, "NVIDIA Other")
    refused = run(*TUNE, "--output", str(theirs))
    assert refused.exit_code == 1
    assert "is the table of 'NVIDIA Other', and this is 'NVIDIA Test'" in refused.output


def test_bench_kernels_uses_this_cards_table_and_writes_everything(run, home: Path, tmp_path: Path):
    write_old(home / "data" / "nvidia-test" / "dispatch.json")
    file = tmp_path / "all.json"
    result = run(
        "bench", "kernels", "--shapes", "7x64,8x64", "--m", "1", "--bits", "w4", "--group", "64", "--json", str(file)
    )
    assert result.exit_code == 0
    assert "data/nvidia-test/dispatch.json" in result.output
    assert "without humming: humming-kernels is not installed" in result.output
    content = json.loads(file.read_text(encoding="utf-8"))
    ours = [row for row in content["results"] if row["peer"] == "deepinfer_lab"]
    assert [(row["n"], row["kernel"], row["correct"]) for row in ours] == [
        (7, "w4_gemv", False), (8, "w4_tiled_gemm_split_k", True),
    ]  # fmt: skip
    assert (content["params"]["m"], content["params"]["all_kernels"]) == ([1], False)
    assert "WRONG" in result.output
    article = Path(tmp_path / "other.json")
    article.write_text(
        '{"schema_version": 1, "rows": [{"bits": 4, "m_min": 1, "m_max": null, "kernel": "w4_tiled_gemm"}]}'
    )
    asked = run(
        "bench", "kernels", "--shapes", "8x64", "--m", "1", "--bits", "w4", "--group", "64", "--dispatch", str(article)
    )
    assert "w4_tiled_gemm\n" in asked.output


def a_row(peer: str, us: float, bits: int = 4, **more) -> dict:
    return {
        "peer": peer, "bits": bits, "m": 1, "n": 5632, "k": 2048, "group": None if bits == 16 else 128,
        "kernel": f"{peer} kernel", "time_us": [us] * 20, "rel_err": 3e-4, "floor_us": 2.0, "correct": True, **more,
    }  # fmt: skip


def test_a_table_shows_gain_over_the_best_right_peer_and_what_was_published(monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_HOME", str(Path(__file__).parents[2]))
    rows = [
        a_row("cublas", 8.0, 16), a_row("deepinfer_lab", 4.0), a_row("tinygemm", 6.0), a_row("humming", 3.0, correct=False),
    ]  # fmt: skip
    bench_kernels.show(rows, "nvidia-h200")
    head, names, line = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("W4, 5632 x 2048, group 128")
    assert names.split()[:5] == ["M", "deepinfer_lab", "cublas", "tinygemm", "humming"]
    assert "4.00 50% 3e-04" in line
    assert "3.00 67% 3e-04 WRONG" in line
    assert " 1.50x " in line  # tinygemm: a wrong result is no competitor
    assert "6.00 tinygemm_w4" in line  # 6.005
    bench_kernels.show(rows, "nvidia-test")
    assert "tinygemm_w4" not in capsys.readouterr().out
    bench_kernels.show([{**row, "group": row["group"] and 64} for row in rows], "nvidia-h200")
    assert "tinygemm_w4" not in capsys.readouterr().out
