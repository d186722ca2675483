"""Weights in tiles to dense float16: the CUDA source, run on the CPU, against the layout; and the product made with it."""

import pytest
import torch

from deepinfer_lab.kernels import catalogue, tiles_check
from deepinfer_lab.kernels import dequantise_tiles as module
from deepinfer_lab.kernels.dequantise_tiles import dequantise_tiles_cublas, unpack
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles


@pytest.fixture
def on_host(host_ops, monkeypatch):
    monkeypatch.setattr(module, "launch_op", host_ops.launch)
    for checking in (module, tiles_check):
        monkeypatch.setattr(checking, "expect", lambda *_, **__: None)


def dense(weight: PackedWeight) -> torch.Tensor:
    tiled = to_tiles(weight)
    out = torch.full((weight.n, weight.k), torch.nan, dtype=torch.float16)
    unpack(tiled.tiles, tiled.scales, tiled.group, out)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    known = ~b.isnan()
    return torch.equal(a.isnan(), ~known) and torch.equal(a.view(torch.int16)[known], b.view(torch.int16)[known])


@pytest.mark.parametrize("bits", [4, 3])
def test_every_value_with_every_scale(on_host, bits):
    """All float16 numbers as scales, also those without a finite or normal product; all values at all places of a unit."""
    values = torch.arange(128, dtype=torch.int8) % 2**bits - 2 ** (bits - 1)
    q = torch.stack([values.roll(row) for row in range(32)]).repeat(512, 1)
    scales = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(-1, 4)
    weight = PackedWeight(bits, 32, len(q), 128, pack(q, bits), scales)
    assert same_bits(dense(weight), weight.dequantise(torch.float16))


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_sizes_that_end_inside_a_unit(on_host, make_weight, bits, group):
    for n in (1, 16, 37):
        for k in (group, 3 * group, 1024 + group):
            weight = make_weight(bits, n, k, group, seed=n + k)
            assert same_bits(dense(weight), weight.dequantise(torch.float16)), (n, k)


@pytest.mark.parametrize("bias", [False, True])
def test_products_slice_by_slice(on_host, make_weight, monkeypatch, bias):
    monkeypatch.setattr(catalogue, "SLICE_BYTES", 1)
    weight = make_weight(4, 300, 160, 32)
    x, added = torch.randn(5, 160).half(), torch.randn(300).half() if bias else None
    tiled = to_tiles(weight)
    out = dequantise_tiles_cublas(x, tiled.tiles, tiled.scales, tiled.n, tiled.group, added)
    expected = x.float() @ weight.dequantise(torch.float32).T + (added.float() if bias else 0)
    assert (out.float() - expected).norm() / expected.norm() < 2e-3
