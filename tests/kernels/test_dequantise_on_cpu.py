"""Dequantising and the product made with it: the CUDA source, run on the CPU through its launchers, against the layout."""

import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import LAUNCHERS, catalogue
from deepinfer_lab.kernels import dequantise as module
from deepinfer_lab.kernels.catalogue import PRODUCTS, SLICE_BYTES
from deepinfer_lab.kernels.check import Operands
from deepinfer_lab.kernels.dequantise import dequantise
from deepinfer_lab.quant.layout import PackedWeight, pack


@pytest.fixture
def on_host(host, monkeypatch):
    """The launchers, sending their work to the CPU program; the checks that ask for a CUDA device are left out."""

    def operands(product, x, packed, scales, group, bias, out):
        return Operands(x, packed, scales, bias, out, *x.shape[:1], *packed.shape[:1], x.shape[1], group)

    monkeypatch.setattr(module, "launch_op", host.launch_op)
    monkeypatch.setattr(module, "expect", lambda *_, **__: None)
    monkeypatch.setattr(module, "check", operands)


def dense(weight: PackedWeight, rows: slice = slice(None)) -> torch.Tensor:
    return dequantise(weight.packed, weight.scales, weight.bits, weight.group, rows)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Zeros of either sign differ; one NaN is as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.view(torch.int16)[~a.isnan()], b.view(torch.int16)[~b.isnan()]
    )


@pytest.mark.parametrize("bits", [4, 3])
def test_every_value_with_every_scale(on_host, bits):
    """All 65536 float16 numbers as scales: subnormals, overflow, infinities, NaN. All values at all places of two words."""
    values = torch.arange(32, dtype=torch.int8) % 2**bits - 2 ** (bits - 1)
    q = torch.stack([values.roll(row) for row in range(32)]).repeat(2048, 1)
    scales = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(-1, 1)
    weight = PackedWeight(bits, 32, 65536, 32, pack(q, bits), scales)
    assert same_bits(dense(weight), weight.dequantise(torch.float16))


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_sizes_that_divide_no_block_and_every_kind_of_range(on_host, make_weight, bits, group):
    for n in (1, 3, 37):
        for k in (group, 3 * group, 1024 + group):
            weight = make_weight(bits, n, k, group, seed=n + k)
            expected = weight.dequantise(torch.float16)
            for rows in (slice(None), slice(1), slice(n // 2, None), slice(-2, None), slice(1, n + 9), slice(2, 1)):
                out = dense(weight, rows)
                assert out.shape == expected[rows].shape
                assert same_bits(out, expected[rows]), (n, k, rows)


def test_a_whole_number_of_blocks_and_one_unit_more_or_less(on_host, make_weight):
    for n in (127, 128, 129):  # 508, 512 and 516 units
        weight = make_weight(3, n, 32, 32, seed=n)
        assert same_bits(dense(weight), weight.dequantise(torch.float16))


@pytest.mark.parametrize("name", ["w4_dequantise_cublas", "w3_dequantise_cublas"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("slice_bytes", [1, SLICE_BYTES])
def test_product_in_slices(on_host, host, make_weight, monkeypatch, name, biased, slice_bytes):
    monkeypatch.setattr(catalogue, "SLICE_BYTES", slice_bytes)
    pieces = []
    monkeypatch.setattr(
        module, "launch_op", lambda *a: pieces.append(a[2][2].data_ptr()) or host.launch_op(*a)
    )  # where each slice becomes dense
    for m, n in ((1, 129), (5, 300), (3, 256), (2, 1)):
        weight = make_weight(PRODUCTS[name].bits, n, 192, 64, seed=n)
        random = torch.Generator().manual_seed(m)
        x, bias = torch.randn(m, 192, generator=random).half(), torch.randn(n, generator=random).half()
        out = torch.full((m, n), torch.nan).half()
        pieces.clear()
        assert LAUNCHERS[name](x, weight.packed, weight.scales, 64, bias if biased else None, out) is out
        expected = x.double() @ weight.dequantise(torch.float64).T + (bias.double() if biased else 0)
        assert (out.double() - expected).norm() / expected.norm() < 2e-3
        assert len(pieces) == (1 if slice_bytes == SLICE_BYTES else -(-n // 128))
        assert len(set(pieces)) == 1  # one workspace for all


def test_slices_are_whole_tiles_within_the_limit():
    product = PRODUCTS["w4_dequantise_cublas"]
    for k in (32, 2048, 3584, 18944, 65536, 2**20):
        rows = product.slice_rows(k)
        assert rows % 128 == 0
        assert rows == 128 or 2 * k * rows <= SLICE_BYTES < 2 * k * (rows + 128)


GOOD = {
    "packed": torch.zeros(5, 32, dtype=torch.uint8),
    "scales": torch.ones(5, 2, dtype=torch.float16),
    "bits": 4,
    "group": 32,
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, r"w4_dequantise: packed is on cpu, must be on a CUDA device"),
        ({"bits": 5}, r"bits = 5, must be 3 or 4"),
        ({"bits": 3}, r"w3_dequantise: packed has shape \(5, 32\), must be \(5, 24\)"),
        ({"group": 16}, r"group = 16, must be one of 32, 64, 128"),
        ({"group": 64}, r"packed has shape \(5, 32\), must be \(5, 64\)"),
        ({"rows": slice(0, 5, 2)}, r"rows has a step of 2, must be 1"),
        ({"rows": slice(None, None, -1)}, r"rows has a step of -1, must be 1"),
        ({"packed": torch.zeros(5, 32, dtype=torch.int8)}, r"packed has dtype torch.int8, must be torch.uint8"),
        ({"packed": torch.zeros(4, 32, dtype=torch.uint8)}, r"packed has shape \(4, 32\), must be \(5, 32\)"),
        ({"packed": torch.zeros(161, dtype=torch.uint8)[1:].view(5, 32)}, r"packed starts at address 0x[0-9a-f]+, must be 4"),
        ({"packed": torch.zeros(5, 64, dtype=torch.uint8)[:, ::2]}, r"packed has strides \(64, 2\), must be contiguous"),
        ({"scales": torch.ones(5, dtype=torch.float16)}, r"scales has shape \(5,\), must be \[N, K / 32\]"),
        ({"scales": torch.ones(5, 0, dtype=torch.float16)}, r"K = 0, must be a positive multiple of group = 32"),
    ],
)  # fmt: skip
def test_wrong_arguments(change, complaint):
    with pytest.raises(KernelError, match=complaint):
        dequantise(**{**GOOD, **change})


def test_wrong_scales_and_outputs_are_refused_too(monkeypatch):
    """What is looked at after the device of `packed`, as if that were a GPU."""
    expect = module.expect
    monkeypatch.setattr(module, "expect", lambda op, name, *a, **k: name == "packed" or expect(op, name, *a, **k))
    for change, complaint in (
        ({"scales": torch.ones(5, 2)}, r"scales has dtype torch.float32, must be torch.float16"),
        ({"scales": torch.ones(2, 5, dtype=torch.float16).T}, r"scales has strides \(1, 5\), must be contiguous"),
    ):
        with pytest.raises(KernelError, match=complaint):
            dequantise(**{**GOOD, **change})
    monkeypatch.setattr(module, "expect", lambda op, name, *a, **k: name != "out" or expect(op, name, *a, **k))
    for out, complaint in (
        (torch.zeros(5, 64), r"out has dtype torch.float32, must be torch.float16"),
        (torch.zeros(5, 64, dtype=torch.float16), r"out has shape \(5, 64\), must be \(3, 64\)"),
        (torch.zeros(3, 128, dtype=torch.float16)[:, ::2], r"out has strides \(128, 2\), must be contiguous"),
        (torch.zeros(193, dtype=torch.float16)[1:].view(3, 64), r"out starts at address 0x[0-9a-f]+, must be 16"),
    ):
        with pytest.raises(KernelError, match=complaint):
            dequantise(**GOOD, rows=slice(1, 4), out=out)
