"""The tensor-core kernel for a few rows: the CUDA source, run on the CPU through its launcher, against float64."""

import pytest
import torch

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import TILED_LAUNCHERS, dispatch, mma_small, resources
from deepinfer_lab.kernels.compiler import ARCHS
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.kernels.mma_small import (
    RING_WARPS,
    Card,
    Plan,
    plan,
    register_plan,
    ring_plan,
    w3_mma_small,
    w4_mma_small,
)
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles

BODIES = ("registers", "ring")
H200, RTX_3050 = Card(132, 227 * 1024), Card(16, 99 * 1024)
bits_and_body = pytest.mark.parametrize(("bits", "body"), [(bits, body) for bits in (4, 3) for body in BODIES])


def stand_in(monkeypatch, launch, multiprocessors: int) -> None:
    """The launchers, sending their work to the CPU program as if to such a card; the check for a CUDA device is left out."""
    monkeypatch.setattr(mma_small, "launch_op", launch)
    monkeypatch.setattr(mma_small, "expect", lambda *_, **__: None)
    monkeypatch.setattr(mma_small, "multiprocessors", lambda _: multiprocessors)
    monkeypatch.setattr(mma_small, "max_shared", lambda _: 2**22)  # so that rings always fit


@pytest.fixture
def on_host(host_ops, monkeypatch):
    stand_in(monkeypatch, host_ops.launch, 4)


def force(monkeypatch, body: str) -> None:
    """The one kernel or the other, whatever the launcher would take."""
    chosen = register_plan if body == "registers" else ring_plan
    monkeypatch.setattr(
        mma_small,
        "plan",
        lambda b, m, n, k, group, card: chosen(b, m, n, *((k, group) if body == "ring" else ()), card),
    )


def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    tiled = to_tiles(weight)
    out = torch.full((x.shape[0], weight.n), torch.nan).half()
    launcher = TILED_LAUNCHERS[f"w{weight.bits}_mma_small"]
    assert launcher(x, tiled.tiles, tiled.scales, weight.n, weight.group, bias, out) is out
    return out


def activations(m: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).half()


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


@bits_and_body
@pytest.mark.parametrize(("n", "k", "group"), [
    (1, 32, 32), (3, 64, 64), (17, 96, 32), (16, 64, 32), (33, 128, 128), (65, 384, 64), (19, 1056, 32), (130, 640, 128),
])  # fmt: skip
def test_matches_reference_on_every_edge(on_host, make_weight, monkeypatch, bits, body, n, k, group):
    force(monkeypatch, body)
    for m in (1, 7, 8, 9, 17, 33):
        weight, x = make_weight(bits, n, k, group, seed=m), activations(m, k)
        bias = activations(1, n)[0] if m % 2 else None
        expected = x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())
        # Weights are exact: what remains is the output's rounding.
        assert error(run(x, weight, bias), expected) < 5e-4, m


@bits_and_body
@pytest.mark.parametrize("group", [32, 64, 128])
def test_more_units_than_are_on_their_way(on_host, make_weight, monkeypatch, bits, body, group):
    """Each of the warps goes round its loop several times, and some once less than others."""
    force(monkeypatch, body)
    k = 128 * 75 + group
    for m, n in ((2, 5), (12, 16 * 5)):
        weight, x = make_weight(bits, n, k, group), activations(m, k)
        assert error(run(x, weight), x.double() @ weight.dequantise(torch.float64).T) < 5e-4


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("warps", [4, 8, 12, 16])
def test_blocks_that_stay_for_many_outputs(host_ops, make_weight, monkeypatch, bits, warps):
    """Rings run on from one 16 outputs to the next, whether a warp has several units of each, one, or none."""
    stand_in(monkeypatch, host_ops.launch, 1)
    for k, n, blocks in ((1152, 16 * 7 + 3, 2), (640, 16 * 5, 1), (256, 16 * 9, 4)):
        weight, x = make_weight(bits, n, k, 128), activations(2, k)
        shared = mma_small.ring_shared(bits, 2, 8, k, 128, warps)
        chosen = Plan(f"w{bits}_mma_ring_8", (1, blocks), warps, shared)
        monkeypatch.setattr(mma_small, "plan", lambda *_, chosen=chosen: chosen)
        assert error(run(x, weight), x.double() @ weight.dequantise(torch.float64).T) < 5e-4


@bits_and_body
@pytest.mark.parametrize("m", [8, 16, 32])
def test_every_value_in_every_place(on_host, monkeypatch, bits, body, m):
    """One-hot activations and power-of-two scales return the weight itself, bit for bit."""
    force(monkeypatch, body)
    k = 160
    values = torch.arange(2**bits, dtype=torch.int8) - 2 ** (bits - 1)
    q = torch.stack([values.roll(row).repeat(k // 2**bits) for row in range(35)])
    weight = PackedWeight(bits, 32, 35, k, pack(q, bits), torch.full((35, k // 32), 0.25).half())
    weight.scales[:, 1::2] = -2.0
    hot = torch.eye(k).half()
    out = torch.cat([run(rows, weight) for rows in hot.split(m)])
    assert torch.equal(out, weight.dequantise(torch.float16).T)


@bits_and_body
def test_a_row_does_not_depend_on_its_batch(on_host, make_weight, monkeypatch, bits, body):
    """While the number of warps is the same, as it is here."""
    force(monkeypatch, body)
    weight, x = make_weight(bits, 37, 1056, 32), activations(40, 1056)
    together = run(x, weight)
    for size in (7, 12):
        assert torch.equal(torch.cat([run(rows, weight) for rows in x.split(size)]), together)


@bits_and_body
@pytest.mark.parametrize("m", [1, 5, 20])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (192, 64)])
def test_nan_and_infinity_propagate(on_host, make_weight, monkeypatch, bits, body, m, k, group):
    """Where K ends inside a unit, neither NaN nor infinity of the same row nor of the next one may leak into the padding."""
    force(monkeypatch, body)
    weight = make_weight(bits, 21, k, group)
    for column, value in ((0, torch.inf), (k // 2 + 1, -torch.inf), (k - 1, torch.nan)):
        x = activations(m, k)
        x[-1, column] = value
        reference = (x.double()[:, None] * weight.dequantise(torch.float64)[None]).sum(2)
        out, finite = run(x, weight), reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
        assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)
        assert finite[:-1].all()


@bits_and_body
def test_sums_beyond_float16_are_no_matter_unless_the_output_is(on_host, make_weight, monkeypatch, bits, body):
    force(monkeypatch, body)
    weight = make_weight(bits, 16, 128, 128)
    x = torch.full((3, 128), 60000.0).half()
    weight.scales.fill_(2.0**-10)
    expected = x.double() @ weight.dequantise(torch.float64).T
    assert torch.allclose(run(x, weight).double(), expected, rtol=1e-3)
    weight.scales.fill_(8.0)
    expected = x.double() @ weight.dequantise(torch.float64).T
    large = expected.abs() > 70000
    assert large.any()
    assert torch.equal(run(x, weight)[large], expected.half()[large])


@pytest.mark.parametrize("body", BODIES)
def test_shared_memory_is_free_of_races(racing_host_ops, make_weight, monkeypatch, body):
    stand_in(monkeypatch, racing_host_ops.launch, 1)
    force(monkeypatch, body)
    for bits, m, n in ((4, 3, 64), (3, 17, 150)):
        weight, x = make_weight(bits, n, 192, 64), activations(m, 192)
        assert error(run(x, weight), x.double() @ weight.dequantise(torch.float64).T) < 5e-4


@pytest.mark.parametrize("arch", ARCHS)
def test_as_many_warps_are_resident_as_the_plans_count_on(arch):
    names = [name for name in OPS if "_mma_" in name and "_mma_block_" not in name]
    try:
        rows = resources.report(names, [arch])
    except MissingDependency as error:
        pytest.skip(str(error))
    assert len(rows) == 16
    for row in rows:
        held = row.occupancy.warps
        assert held >= (RING_WARPS[int(row.kernel.split("_")[-1])] if "ring" in row.kernel else 16), row
        assert row.usage.spill_stores == row.usage.spill_loads == 0, row


def test_blocks_of_registers_take_outputs_in_pairs_only_where_they_are_many():
    assert register_plan(4, 8, 16 * 132, H200) == Plan("w4_mma_8", (1, 132), 16)
    assert register_plan(4, 9, 16 * 132 + 1, H200) == Plan("w4_mma_16_pair", (1, 67), 16)
    assert register_plan(3, 33, 16 * 200, H200) == Plan("w3_mma_32", (2, 200), 16)


@pytest.mark.parametrize("card", [H200, RTX_3050])
@pytest.mark.parametrize("bits", [4, 3])
def test_plans_fit_the_card(card, bits):
    for m in (1, 2, 8, 9, 16, 32, 100):
        for n, k in (
            (5632, 2048),
            (3584, 18944),
            (22016, 2048),
            (2048, 11008),
            (2048, 2048),
            (9, 32),
            (65535 * 16, 64),
        ):
            for group in (32, 128):
                chosen = plan(bits, m, n, k, group if k >= group else 32, card)
                assert chosen.shared <= card.shared
                assert chosen.grid[1] <= min(-(-n // 16), 65535)
                assert 32 * chosen.warps <= OPS[chosen.op].threads


def test_plans_for_an_h200():
    assert plan(4, 1, 2048, 11008, 128, H200).warps == 16  # a block to a multiprocessor, and as much of it as there is
    many = plan(4, 1, 22016, 2048, 128, H200)
    assert (many.op, many.warps, many.grid) == ("w4_mma_ring_8", 4, (1, 132 * 8))
    assert plan(3, 8, 3584, 18944, 128, H200) == register_plan(3, 8, 3584, H200)  # 303 KB of activations
    assert plan(4, 8, 2048, 11008, 128, H200).op == "w4_mma_8"  # 176 KB, which leave room for 8 warps


TILES = {
    "tiles": torch.zeros(1, 1, 1024, dtype=torch.uint8),
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
        ({"x": torch.zeros(2, 192).half()}, r"tiles has shape \(1, 1, 1024\), must be \(1, 2, 1024\)"),
        ({"x": torch.zeros(2, 128).half().requires_grad_()}, r"requires a gradient"),
        ({"n": 0}, r"N = 0, must be 1 to 1048560"),
        ({"n": 17}, r"tiles has shape \(1, 1, 1024\), must be \(2, 1, 1024\)"),
        ({"group": 16}, r"group = 16, must be one of 32, 64, 128"),
        ({"tiles": torch.zeros(1, 1, 1024, dtype=torch.int8)}, r"tiles has dtype torch.int8, must be torch.uint8"),
        ({"tiles": torch.zeros(1025, dtype=torch.uint8)[1:].view(1, 1, 1024)}, r"must be 16-byte aligned"),
    ],
)
def test_wrong_arguments(change, complaint):
    with pytest.raises(KernelError, match=complaint):
        w4_mma_small(**{**GOOD, **change})


def test_tiles_of_other_bits_are_refused():
    with pytest.raises(KernelError, match=r"w3_mma_small: tiles has shape \(1, 1, 1024\), must be \(1, 1, 768\)"):
        w3_mma_small(**GOOD)


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
