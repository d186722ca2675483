"""The tensor-core kernel for a few rows: the CUDA source, run on the CPU through its launcher, against float64."""

import pytest
import torch
from small_products import FORMS, activations, error, force, stand_in
from tile_operands import GOOD, REFUSED

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import TILED_LAUNCHERS, dispatch, resources, tiles_check
from deepinfer_lab.kernels.compiler import ARCHS
from deepinfer_lab.kernels.dispatch import FALLBACK, Row
from deepinfer_lab.kernels.mma_small import Card, Norm, Plan, norm_plan, norm_shared, plan, w3_mma_small, w4_mma_small
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles

H200, RTX_3050 = Card(132, 227 * 1024), Card(16, 99 * 1024)
bits_and_form = pytest.mark.parametrize(("bits", "form"), [(bits, form) for bits in (4, 3) for form in FORMS])
# A kernel with loops of its own in each: how many rows, outputs and warps there are is a number, the rest is one source.
bits_and_loop = pytest.mark.parametrize(("bits", "form"), [(4, "8"), (3, "8_many"), (4, "16_pair"), (3, "32_many")])


@pytest.fixture
def on_host(host_ops, monkeypatch):
    stand_in(monkeypatch, host_ops.launch)


def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    tiled = to_tiles(weight)
    out = torch.full((x.shape[0], weight.n), torch.nan).half()
    launcher = TILED_LAUNCHERS[f"w{weight.bits}_mma_small"]
    assert launcher(x, tiled.tiles, tiled.scales, weight.n, weight.group, bias, out) is out
    return out


@bits_and_form
def test_matches_reference_on_every_edge(on_host, make_weight, monkeypatch, bits, form):
    rows = force(monkeypatch, form)
    for m, n, k, group in (
        (1, 1, 32, 32), (rows - 1, 17, 96, 32), (rows, 33, 128, 128), (rows + 1, 35, 192, 64),
    ):  # fmt: skip
        weight, x = make_weight(bits, n, k, group, seed=m), activations(m, k)
        bias = activations(1, n)[0] if m % 2 else None
        expected = x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())
        # Weights are exact: what remains is the output's rounding.
        assert error(run(x, weight, bias), expected) < 5e-4, (m, n, k, group)


@pytest.mark.parametrize("group", [32, 64, 128])
@bits_and_form
def test_more_units_than_are_on_their_way(on_host, make_weight, monkeypatch, bits, form, group):
    """Each of the warps goes round its loop several times, and some once less than others."""
    force(monkeypatch, form)
    depth = 5 if form in ("8", "16") else 3
    k = 128 * (16 * depth - 5) + group if "many" not in form else 128 * (8 * depth - 3) + group
    weight, x = make_weight(bits, 5, k, group), activations(2, k)
    assert error(run(x, weight), x.double() @ weight.dequantise(torch.float64).T) < 5e-4


@bits_and_loop
def test_every_value_in_every_place(on_host, monkeypatch, bits, form):
    """One-hot activations and power-of-two scales return the weight itself, bit for bit."""
    rows, k = force(monkeypatch, form), 160
    values = torch.arange(2**bits, dtype=torch.int8) - 2 ** (bits - 1)
    q = torch.stack([values.roll(row).repeat(k // 2**bits) for row in range(35)])
    weight = PackedWeight(bits, 32, 35, k, pack(q, bits), torch.full((35, k // 32), 0.25).half())
    weight.scales[:, 1::2] = -2.0
    hot = torch.eye(k).half()
    out = torch.cat([run(part, weight) for part in hot.split(2 * rows)])
    assert torch.equal(out, weight.dequantise(torch.float16).T)


@pytest.mark.parametrize("bits", [4, 3])
def test_a_row_does_not_depend_on_its_batch(on_host, make_weight, monkeypatch, bits):
    """Nor on the kernel, among those with as many warps."""
    weight, x = make_weight(bits, 37, 1056, 32), activations(18, 1056)
    for same in (("8", "8_pair", "16", "16_pair", "32"), ("8_many", "16_many", "32_many")):
        results = []
        for form in same:
            rows = force(monkeypatch, form)
            results.append(torch.cat([run(part, weight) for part in x.split(min(rows, 15) - 1)]))
        assert all(torch.equal(result, results[0]) for result in results[1:]), same


@bits_and_loop
@pytest.mark.parametrize(("k", "group"), [(96, 32), (192, 64)])
def test_nan_and_infinity_propagate(on_host, make_weight, monkeypatch, bits, form, k, group):
    """Where K ends inside a unit, neither NaN nor infinity of the same row nor of the next one may leak into the padding."""
    m = force(monkeypatch, form) - 3
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


@pytest.mark.parametrize("bits", [4, 3])
def test_sums_beyond_float16_are_no_matter_unless_the_output_is(on_host, make_weight, bits):
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


def test_shared_memory_is_free_of_races(racing_host_ops, make_weight, monkeypatch):
    stand_in(monkeypatch, racing_host_ops.launch)
    for bits, form in ((4, "8_pair"), (3, "16_many")):
        weight, x = make_weight(bits, 35, 192, 64), activations(force(monkeypatch, form), 192)
        assert error(run(x, weight), x.double() @ weight.dequantise(torch.float64).T) < 5e-4


@pytest.mark.parametrize("arch", ARCHS)
def test_as_many_small_blocks_are_resident_as_were_measured(arch):
    wanted = {"8_many": 4, "8_many_norm": 4, "16_many": 3, "32_many": 2}
    try:
        rows = resources.report([f"w{bits}_mma_{form}" for bits in (4, 3) for form in wanted], [arch])
    except MissingDependency as error:
        pytest.skip(str(error))
    assert all(row.occupancy.blocks >= wanted[row.kernel.split("_mma_")[1]] for row in rows), rows


def test_every_plan_for_an_h200():
    """16 warps where each block has a multiprocessor to itself, pairs of outputs up to twice as many, then 8 warps."""
    for m, forms in (
        (1, ("8", "8_pair", "8_many")),
        (16, ("16", "16_pair", "16_many")),
        (33, ("32", "32_many", "32_many")),
    ):
        for n, form in zip((16 * 132, 16 * 264, 16 * 264 + 1), forms, strict=True):
            count, columns, rows = -(-n // 16), 1 + ("pair" in form), int(form.split("_")[0])
            assert plan(4, m, n, H200) == Plan(f"w4_mma_{form}", (-(-m // rows), -(-count // columns)))
    assert plan(3, 9, 16 * 132 + 1, H200).op == "w3_mma_16_pair"


def test_a_norm_is_made_by_as_many_warps_where_it_fits_beside_the_blocks_that_are_wanted():
    """Blocks of many outputs stay: four to a multiprocessor, or three where rows are long."""
    for n, blocks in ((16 * 132, 132), (16 * 264, 132), (22016, 4 * 132), (16 * 300, 300)):
        plain, normed = plan(4, 8, n, H200), norm_plan(4, 8, n, 2048, H200)
        assert normed == Plan(f"{plain.op}_norm", (1, blocks), norm_shared(8, 2048))
    assert norm_shared(8, 2048) == 9 * (4096 + 64)
    assert norm_plan(3, 8, 22016, 3584, H200).grid == (1, 3 * 132)
    assert norm_plan(3, 8, 22016, 4096, H200) is None
    assert norm_plan(3, 8, 2048, 8192, H200).grid == (1, 128)
    assert norm_plan(4, 1, 22016, 2048, RTX_3050).grid == (1, 4 * 16)
    assert norm_plan(4, 8, 22016, 2048, RTX_3050) is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        *REFUSED,
        ({}, r"w4_mma_small: tiles is on cpu, must be on a CUDA device"),
        ({"n": 0}, r"N = 0, must be 1 to 1048560"),
        ({"gated": True}, r"N = 5, must be a multiple of 16 where gated"),
        ({"gated": True, "n": 16, "residual": torch.zeros(2, 16).half()}, r"residual is given and gated is True"),
        (
            {"x": torch.zeros(9, 128).half(), "norm": Norm(torch.ones(128).half(), 1e-5)},
            r"with a norm: M = 9, must be 1 to 8",
        ),
    ],
)
def test_wrong_arguments(change, complaint):
    with pytest.raises(KernelError, match=complaint):
        w4_mma_small(**{**GOOD, **change})


def test_tiles_of_other_bits_are_refused():
    with pytest.raises(KernelError, match=r"w3_mma_small: tiles has shape \(1, 1, 1024\), must be \(1, 1, 768\)"):
        w3_mma_small(**GOOD)


def test_what_is_looked_at_after_the_device(monkeypatch):
    expect = tiles_check.expect
    monkeypatch.setattr(tiles_check, "expect", lambda op, name, *a, **k: name == "tiles" or expect(op, name, *a, **k))
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
