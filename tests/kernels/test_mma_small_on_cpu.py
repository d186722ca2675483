"""The tensor-core kernel for a few rows: the CUDA source, run on the CPU through its launcher, against float64."""

import pytest
import torch

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import dispatch, mma_small, resources
from deepinfer_lab.kernels.compiler import ARCHS
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.kernels.mma_small import RESIDENT, w4_mma_small, warps_for
from deepinfer_lab.kernels.ops_catalogue import MMA_ROWS
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles


@pytest.fixture
def on_host(host_ops, monkeypatch):
    """The launcher, sending its work to the CPU program as if to a card of four multiprocessors."""
    monkeypatch.setattr(mma_small, "launch_op", host_ops.launch)
    monkeypatch.setattr(mma_small, "expect", lambda *_, **__: None)  # it asks for a CUDA device
    monkeypatch.setattr(mma_small, "multiprocessors", lambda _: 4)


def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    tiled = to_tiles(weight)
    out = torch.full((x.shape[0], weight.n), torch.nan).half()
    assert w4_mma_small(x, tiled.tiles, tiled.scales, weight.n, weight.group, bias, out) is out
    return out


def activations(m: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(("n", "k", "group"), [
    (1, 32, 32), (3, 64, 64), (17, 96, 32), (16, 64, 32), (33, 128, 128), (65, 384, 64), (19, 1056, 32), (130, 640, 128),
])  # fmt: skip
def test_matches_reference_on_every_edge(on_host, make_weight, n, k, group):
    for m in (1, 2, 7, 8, 9, 16, 17, 32, 33):
        weight, x = make_weight(4, n, k, group, seed=m), activations(m, k)
        bias = activations(1, n)[0] if m % 2 else None
        expected = x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())
        error = (run(x, weight, bias).double() - expected).norm() / expected.norm()
        assert error < 5e-4, m  # weights are exact: what remains is the output's rounding


@pytest.mark.parametrize("group", [32, 128])
def test_more_units_than_are_on_their_way(on_host, make_weight, group):
    """Each of 8 or 16 warps goes round its loop several times, and some once less than others."""
    k = 64 * 166 + group % 64
    for m, n in ((2, 5), (12, 16 * 5), (20, 16 * 5)):
        weight, x = make_weight(4, n, k, group), activations(m, k)
        expected = x.double() @ weight.dequantise(torch.float64).T
        assert (run(x, weight).double() - expected).norm() / expected.norm() < 5e-4


@pytest.mark.parametrize("m", [1, 9, 17])
def test_every_value_in_every_place(on_host, m):
    """One-hot activations and power-of-two scales return the weight itself, bit for bit."""
    k = 160
    values = torch.arange(16, dtype=torch.int8) - 8
    q = torch.stack([values.roll(row).repeat(k // 16) for row in range(35)])
    weight = PackedWeight(4, 32, 35, k, pack(q, 4), torch.full((35, k // 32), 0.25).half())
    weight.scales[:, 1::2] = -2.0
    hot = torch.eye(k).half()
    out = torch.cat([run(rows, weight) for rows in hot.split(m)])
    assert torch.equal(out, weight.dequantise(torch.float16).T)


def test_a_row_does_not_depend_on_its_batch(on_host, make_weight):
    weight, x = make_weight(4, 37, 1056, 32), activations(40, 1056)
    together = run(x, weight)
    for size in (1, 7, 12):
        assert torch.equal(torch.cat([run(rows, weight) for rows in x.split(size)]), together)


@pytest.mark.parametrize("m", [1, 5, 11, 20])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (192, 64)])
def test_nan_and_infinity_propagate(on_host, make_weight, m, k, group):
    """Where K ends inside a unit, neither NaN nor infinity of the same row nor of the next one may leak into the padding."""
    weight = make_weight(4, 21, k, group)
    for column, value in ((0, torch.inf), (k // 2 + 1, -torch.inf), (k - 1, torch.nan)):
        x = activations(m, k)
        x[-1, column] = value
        reference = (x.double()[:, None] * weight.dequantise(torch.float64)[None]).sum(2)
        out, finite = run(x, weight), reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
        assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)
        assert finite[:-1].all()


def test_sums_beyond_float16_are_no_matter_unless_the_output_is(on_host, make_weight):
    weight = make_weight(4, 16, 128, 128)
    x = torch.full((3, 128), 60000.0).half()
    weight.scales.fill_(2.0**-10)
    expected = x.double() @ weight.dequantise(torch.float64).T
    assert torch.allclose(run(x, weight).double(), expected, rtol=1e-3)
    weight.scales.fill_(8.0)
    expected = x.double() @ weight.dequantise(torch.float64).T
    large = expected.abs() > 70000
    assert large.any()
    assert torch.equal(run(x, weight)[large], expected.half()[large])


def test_shared_memory_is_free_of_races(racing_host_ops, make_weight, monkeypatch):
    monkeypatch.setattr(mma_small, "launch_op", racing_host_ops.launch)
    monkeypatch.setattr(mma_small, "expect", lambda *_, **__: None)
    monkeypatch.setattr(mma_small, "multiprocessors", lambda _: 1)
    for m, n in ((3, 64), (17, 20)):
        weight, x = make_weight(4, n, 192, 64), activations(m, 192)
        expected = x.double() @ weight.dequantise(torch.float64).T
        assert (run(x, weight).double() - expected).norm() / expected.norm() < 5e-4


@pytest.mark.parametrize("arch", ARCHS)
def test_as_many_blocks_are_resident_as_the_choice_of_warps_counts_on(arch):
    try:
        rows = resources.report([f"w4_mma_{rows}_16" for rows in MMA_ROWS], [arch])
    except MissingDependency as error:
        pytest.skip(str(error))
    assert [row.occupancy.blocks for row in rows] == [RESIDENT[rows] for rows in MMA_ROWS]


def test_blocks_have_many_warps_only_where_they_are_few():
    for rows in MMA_ROWS:
        fit = 132 * RESIDENT[rows]
        assert warps_for(rows, 1, 132) == warps_for(rows, fit, 132) == 16
        assert warps_for(rows, fit + 1, 132) == 8


TILES = {
    "tiles": torch.zeros(1, 2, 512, dtype=torch.uint8),
    "scales": torch.ones(1, 2, 8, 2).half(),
    "n": 5,
    "group": 64,
}
GOOD = {"x": torch.zeros(2, 128).half(), **TILES}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, r"w4_mma_small: tiles is on cpu, must be on a CUDA device"),
        ({"x": torch.zeros(2, 128)}, r"x has dtype torch.float32, must be torch.float16"),
        ({"x": torch.zeros(128).half()}, r"x has shape \(128,\), must be \[M, K\]"),
        ({"x": torch.zeros(0, 128).half()}, r"M = 0, must be 1 to"),
        ({"x": torch.zeros(2, 96).half()}, r"K = 96, must be a positive multiple of group = 64"),
        ({"x": torch.zeros(2, 64).half()}, r"tiles has shape \(1, 2, 512\), must be \(1, 1, 512\)"),
        ({"x": torch.zeros(2, 128).half().requires_grad_()}, r"requires a gradient"),
        ({"n": 0}, r"N = 0, must be 1 to 1048560"),
        ({"n": 17}, r"tiles has shape \(1, 2, 512\), must be \(2, 2, 512\)"),
        ({"group": 16}, r"group = 16, must be one of 32, 64, 128"),
        ({"tiles": torch.zeros(1, 2, 512, dtype=torch.int8)}, r"tiles has dtype torch.int8, must be torch.uint8"),
        ({"tiles": torch.zeros(1025, dtype=torch.uint8)[1:].view(1, 2, 512)}, r"must be 16-byte aligned"),
    ],
)
def test_wrong_arguments(change, complaint):
    with pytest.raises(KernelError, match=complaint):
        w4_mma_small(**{**GOOD, **change})


def test_what_is_looked_at_after_the_device(monkeypatch):
    expect = mma_small.expect
    monkeypatch.setattr(mma_small, "expect", lambda op, name, *a, **k: name == "tiles" or expect(op, name, *a, **k))
    with pytest.raises(KernelError, match=r"scales has shape \(1, 2, 8, 2\), must be \(1, 1, 8, 2\)"):
        w4_mma_small(**{**GOOD, "group": 128})


def test_a_table_may_name_it():
    table = (Row(4, 1, 32, "w4_mma_small"), Row(4, 33, None, FALLBACK), Row(3, 1, None, FALLBACK))
    dispatch.validate(table, "test")
    assert [dispatch.choose(4, m, table=table) for m in (1, 32, 33)] == ["w4_mma_small", "w4_mma_small", FALLBACK]
    assert "re-packed" in dispatch.explain(4, 3, 64, 128, 32, table=table)
    assert dispatch.needs_tiles(4, table)
    assert not dispatch.needs_tiles(3, table)
    assert not dispatch.needs_tiles(4, dispatch.ARTICLE)
    with pytest.raises(KernelError, match="takes 4-bit weights, not 3"):
        dispatch.validate((Row(3, 1, None, "w4_mma_small"),), "test")
