"""The tensor-core kernels on weights as stored: the CUDA source, run on the CPU through its launchers, against float64."""

import pytest
import torch

from deepinfer_lab.errors import KernelError, MissingDependency
from deepinfer_lab.kernels import LAUNCHERS, mma_stored, resources
from deepinfer_lab.kernels.check import Operands
from deepinfer_lab.kernels.compiler import ARCHS
from deepinfer_lab.kernels.mma_stored import warps_for
from deepinfer_lab.kernels.ops_catalogue import MMA_ROWS
from deepinfer_lab.quant.layout import PackedWeight, pack

NAMES = {4: "w4_mma_stored", 3: "w3_mma_stored"}


def stand_in(monkeypatch, launch, multiprocessors: int) -> None:
    """The launchers, sending their work to the CPU program as if to such a card; the check for a CUDA device is left out."""

    def operands(product, x, packed, scales, group, bias, out):
        return Operands(x, packed, scales, bias, out, x.shape[0], packed.shape[0], x.shape[1], group)

    monkeypatch.setattr(mma_stored, "launch_op", launch)
    monkeypatch.setattr(mma_stored, "check", operands)
    monkeypatch.setattr(mma_stored, "multiprocessors", lambda _: multiprocessors)


@pytest.fixture
def on_host(host_ops, monkeypatch):
    stand_in(monkeypatch, host_ops.launch, 4)


def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.n), torch.nan).half()
    assert LAUNCHERS[NAMES[weight.bits]](x, weight.packed, weight.scales, weight.group, bias, out) is out
    return out


def activations(m: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).half()


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("n", "k", "group"), [
    (1, 32, 32), (3, 64, 64), (17, 96, 32), (16, 64, 32), (33, 128, 128), (65, 384, 64), (19, 1056, 32), (70, 640, 128),
])  # fmt: skip
def test_matches_reference_on_every_edge(on_host, make_weight, bits, n, k, group):
    for m in (1, 7, 8, 9, 16, 17, 33):
        weight, x = make_weight(bits, n, k, group, seed=m), activations(m, k)
        bias = activations(1, n)[0] if m % 2 else None
        expected = x.double() @ weight.dequantise(torch.float64).T + (0 if bias is None else bias.double())
        assert error(run(x, weight, bias), expected) < 5e-4, (
            m
        )  # weights are exact: what remains is the output's rounding


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_more_units_than_are_on_their_way(on_host, make_weight, bits, group):
    """Each of 8 or 16 warps goes round its loop several times, and some once less than others."""
    k = group * 149
    for m, n in ((2, 5), (2, 16 * 5), (12, 3), (20, 16 * 5)):
        weight, x = make_weight(bits, n, k, group), activations(m, k)
        assert error(run(x, weight), x.double() @ weight.dequantise(torch.float64).T) < 5e-4


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_value_in_every_place(on_host, bits, group):
    """One-hot activations and power-of-two scales return the weight itself, bit for bit."""
    k = 256
    values = torch.arange(2**bits, dtype=torch.int8) - 2 ** (bits - 1)
    q = torch.stack([values.roll(row).repeat(k // 2**bits) for row in range(19)])
    weight = PackedWeight(bits, group, 19, k, pack(q, bits), torch.full((19, k // group), 0.25).half())
    weight.scales[:, 1::2] = -2.0
    hot = torch.eye(k).half()
    for m in (8, 16, 32):
        out = torch.cat([run(rows, weight) for rows in hot.split(m)])
        assert torch.equal(out, weight.dequantise(torch.float16).T)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("n", [37, 67])
def test_a_row_does_not_depend_on_its_batch(on_host, make_weight, bits, n):
    weight, x = make_weight(bits, n, 640, 64), activations(40, 640)
    together = run(x, weight)
    for size in (1, 7, 12):
        assert torch.equal(torch.cat([run(rows, weight) for rows in x.split(size)]), together)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("m", [1, 11, 20])
def test_nan_and_infinity_propagate(on_host, make_weight, bits, m):
    weight = make_weight(bits, 21, 96, 32)
    for column, value in ((0, torch.inf), (37, -torch.inf), (95, torch.nan)):
        x = activations(m, 96)
        x[-1, column] = value
        reference = (x.double()[:, None] * weight.dequantise(torch.float64)[None]).sum(2)
        out, finite = run(x, weight), reference.isfinite()
        assert torch.equal(out.isnan(), reference.isnan())
        assert torch.equal(out[reference.isinf()], reference[reference.isinf()].half())
        assert torch.allclose(out[finite].double(), reference[finite], rtol=2e-3, atol=2e-3)
        assert finite[:-1].all()


@pytest.mark.parametrize("bits", [4, 3])
def test_sums_beyond_float16_are_no_matter_unless_the_output_is(on_host, make_weight, bits):
    weight, x = make_weight(bits, 16, 128, 128), torch.full((3, 128), 60000.0).half()
    weight.scales.fill_(2.0**-10)
    assert torch.allclose(run(x, weight).double(), x.double() @ weight.dequantise(torch.float64).T, rtol=1e-3)
    weight.scales.fill_(8.0)
    expected = x.double() @ weight.dequantise(torch.float64).T
    large = expected.abs() > 70000
    assert large.any()
    assert torch.equal(run(x, weight)[large], expected.half()[large])


def test_shared_memory_is_free_of_races(racing_host_ops, make_weight, monkeypatch):
    stand_in(monkeypatch, racing_host_ops.launch, 1)
    for bits, m, n in ((4, 3, 40), (3, 17, 20)):
        weight, x = make_weight(bits, n, 192, 64), activations(m, 192)
        assert error(run(x, weight), x.double() @ weight.dequantise(torch.float64).T) < 5e-4


@pytest.mark.parametrize("arch", ARCHS)
def test_registers_let_a_multiprocessor_hold_what_its_loads_need(arch):
    """16 warps, each with 2 KiB of W4 on their way, are the 32 KiB that hide an H200's latency."""
    names = [f"{name}_{rows}_{warps}" for name in NAMES.values() for rows in MMA_ROWS for warps in (8, 16)]
    try:
        rows = resources.report(names, [arch])
    except MissingDependency as error:
        pytest.skip(str(error))
    assert [row.kernel for row in rows if row.occupancy.warps < 16] == []


def test_blocks_have_many_warps_only_where_they_are_few():
    assert warps_for(1, 132) == warps_for(132, 132) == 16
    assert warps_for(133, 132) == 8


def test_weights_that_one_load_cannot_take_are_refused(on_host, make_weight):
    weight = make_weight(4, 4, 128, 128)
    shifted = torch.zeros(4 * 64 + 4, dtype=torch.uint8)[4:].view(4, 64)
    with pytest.raises(
        KernelError, match=r"w4_mma_stored: packed starts at address 0x[0-9a-f]+, must be 16-byte aligned"
    ):
        LAUNCHERS["w4_mma_stored"](activations(1, 128), shifted, weight.scales, 128)
