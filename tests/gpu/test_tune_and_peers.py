"""Tuning and the comparison with peers, with real kernels, on a small weight. Peers that are not installed have no test."""

import pytest
import torch

from deepinfer_lab.kernels import dispatch
from deepinfer_lab.lab import kernel_peers, peers, provenance
from deepinfer_lab.lab.experiment import complete
from deepinfer_lab.lab.kernel_cells import kernels_for
from deepinfer_lab.lab.kernel_ladder import KERNEL_LADDER, clock_hz, ladder_rows, rungs
from deepinfer_lab.lab.kernel_timing import CudaGpu
from deepinfer_lab.lab.kernel_tune import table_from, timings
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.rtn import quantise

N, K, GROUP = 1024, 2048, 128  # few copies fill the L2


@pytest.fixture(scope="module")
def gpu() -> CudaGpu:
    return CudaGpu()


def test_a_tuned_table_serves_the_shape(gpu):
    found = list(timings(gpu, [(N, K)], [4, 3], (1, 2, 16, 64), group=GROUP))
    assert [timing for timing in found if timing.fault] == []
    assert {timing.kernel for timing in found if timing.m == 1} == {
        *kernels_for(4, 1, gpu.device),
        *kernels_for(3, 1, gpu.device),
    } - {dispatch.FALLBACK}
    table = table_from(found)
    for bits in (4, 3):
        weight = quantise(torch.randn(N, K), bits, GROUP).to("cuda")
        layer = QuantLinear(weight, table=table)
        dense = weight.dequantise(torch.float32)
        for m in (1, 2, 3, 16, 17, 64, 65, 200):
            x = torch.randn(m, K, device="cuda").half()
            expected = x.float() @ dense.T
            name = dispatch.choose(bits, m, table=table, n=N, k=K)
            assert (layer(x).float() - expected).norm() < 2e-3 * expected.norm(), (name, m)


@pytest.mark.parametrize("name", [peer.name for peer in peers.find()])
def test_a_peer_computes_what_we_do(gpu, name):
    said: list[str] = []
    settings = {"shapes": [[N, K]], "m": [1, 16, 100], "against": [name], "group": GROUP}
    rows = list(
        kernel_peers.peer_rows(complete(kernel_peers.KERNEL_PEERS, settings), gpu, dispatch.ARTICLE, said.append)
    )
    theirs = [row for row in rows if row["peer"] == name]
    assert {(row["bits"], row["m"]) for row in theirs} >= {(4, 1), (4, 16), (4, 100)}, said
    assert all(row["correct"] for row in rows), [(row["peer"], row["kernel"], row["rel_err"]) for row in rows]


def test_every_rung_of_the_ladder_is_right_or_says_why_not(gpu):
    said: list[str] = []
    settings = {"shapes": [[N, K]], "m": [1, 8, 16, 100], "group": GROUP, "square": 1024}
    origin = provenance.collect()
    params = complete(KERNEL_LADDER, settings)
    rows = list(ladder_rows(params, gpu, origin["multiprocessors"], clock_hz(origin), said.append))
    assert all(row["correct"] for row in rows), [(row["kernel"], row["m"], row["rel_err"]) for row in rows]
    due = sum(len(rungs(bits, m)) for bits in (4, 3, 16) for m in settings["m"])
    assert len(rows) - 2 + len(said) == due
    assert all("wide" in text for text in said), said  # on cards before Hopper
    assert all(row["predicted_us"] > 0 for row in rows[2:])
