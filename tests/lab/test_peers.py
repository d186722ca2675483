"""Peers' own forms of a weight hold exactly our values, read back by what their documentation says, without any of them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepinfer_lab.errors import MissingDependency, SettingError
from deepinfer_lab.lab import peers
from deepinfer_lab.lab.peers import gemlite, humming, peer, tinygemm
from deepinfer_lab.quant.layout import PackedWeight, pack

SHAPES = [(1, 64, 32), (8, 128, 64), (3, 256, 128), (5, 96, 32)]


def random_weight(n: int, k: int, group: int, bits: int) -> PackedWeight:
    random = torch.Generator().manual_seed(n + k)
    q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), generator=random, dtype=torch.int8)
    scales = (torch.randn(n, k // group, generator=random) * 0.1).half()
    return PackedWeight(bits, group, n, k, pack(q, bits), scales)


def dense(values: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    return values.float() * scales.float().repeat_interleave(group, dim=1)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_tinygemms_form(n, k, group):
    weight = random_weight(n, k, group, 4)
    values, scales_and_zeros = tinygemm.operands(weight)
    assert (values.dtype, scales_and_zeros.dtype) == (torch.uint8, torch.bfloat16)
    assert scales_and_zeros.shape == (k // group, n, 2)
    assert scales_and_zeros.is_contiguous()
    assert not scales_and_zeros[:, :, 1].any()
    unpacked = (
        torch.stack([values >> 4, values & 15], dim=2).view(n, k).to(torch.int32) - 8
    )  # even k in the high nibble
    rounded = weight.scales.bfloat16()
    assert torch.equal(scales_and_zeros[:, :, 0].t(), rounded)
    assert torch.equal(dense(unpacked, weight.scales, group), weight.dequantise(torch.float32))


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_hummings_form(n, k, group, bits):
    weight = random_weight(n, k, group, bits)
    tensors = humming.operands(weight)
    assert tensors["weight"].shape == (n, k * bits // 32)
    assert tensors["weight"].dtype == torch.int32
    stream = np.unpackbits(tensors["weight"].numpy().view(np.uint8), axis=1, bitorder="little").reshape(n, k, bits)
    values = torch.from_numpy((stream << np.arange(bits)).sum(axis=2).astype(np.int32)) - 2 ** (bits - 1)
    assert torch.equal(dense(values, tensors["weight_scale"], group), weight.dequantise(torch.float32))


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_gemlites_form(n, k, group):
    weight = random_weight(n, k, group, 4)
    values = gemlite.stored_values(weight)
    assert values.dtype == torch.uint8
    assert torch.equal(dense(values.int() - gemlite.OFFSET, weight.scales, group), weight.dequantise(torch.float32))


def test_what_peers_refuse():
    known = peers.PEERS
    assert all(it.refusal(4, 5632, 2048, 128) is None for it in known.values())
    assert known["humming"].refusal(3, 5632, 2048, 128) is None
    assert known["humming"].refusal(5, 5632, 2048, 128) == "it is asked for 3 and 4 bits, not 5"
    assert "multiple of 64" in known["humming"].refusal(4, 100, 2048, 128)
    for name in ("tinygemm", "gemlite"):
        assert "4" in known[name].refusal(3, 5632, 2048, 128)
    assert "multiple of 8" in known["tinygemm"].refusal(4, 100, 2048, 128)
    assert "one of 128" in known["tinygemm"].refusal(4, 64, 2048 + 64, 64)
    assert "multiple of 32" in known["gemlite"].refusal(4, 64, 48, 32)


def test_who_is_there(monkeypatch):
    monkeypatch.setattr(peer, "installed", lambda name: "1.2" if name == "gemlite" else None)
    assert [it.name for it in peers.find()] == ["tinygemm", "gemlite"]
    assert [it.name for it in peers.find(["gemlite"])] == ["tinygemm", "gemlite"]  # torch's own is always there
    assert [it.name for it in peers.find(["tinygemm"])] == ["tinygemm"]
    assert peers.PEERS["gemlite"].kernel == "gemlite 1.2"
    with pytest.raises(
        MissingDependency, match=r"'humming': humming-kernels is not installed; `pip install .*\[peers\]'`"
    ):
        peers.find(["gemlite", "humming"])
    with pytest.raises(SettingError, match="'marlin': allowed are tinygemm, humming, gemlite"):
        peers.find(["marlin"])


def test_importing_the_peers_imports_none_of_them():
    assert not {"humming", "gemlite"} & set(sys.modules)


def test_layers_are_made_as_documented(monkeypatch):
    """With stand-ins for both packages: names and order of arguments."""
    made = {}

    class Layer:
        def __init__(self, *args, **settings):
            made.update(args=args, **settings)

        def to(self, device):
            return self

        def load_from_tensors(self, tensors):
            made["tensors"] = tensors

        def transform(self):
            made["transformed"] = True

        def pack(self, values, scales, zeros, bias):
            made.update(values=values, scales=scales, zeros=zeros, bias=bias)

    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=Layer))
    monkeypatch.setitem(
        sys.modules, "gemlite", SimpleNamespace(GemLiteLinear=Layer, DType=SimpleNamespace(FP16="fp16"))
    )
    weight = random_weight(64, 128, 64, 3)
    peers.PEERS["humming"].prepare(weight)
    assert (made["shape_n"], made["shape_k"], made["transformed"]) == (64, 128, True)
    assert made["weight_config"] == {"dtype": "int3", "group_size": 64}
    assert set(made["tensors"]) == {"weight", "weight_scale"}
    made.clear()
    peers.PEERS["gemlite"].prepare(random_weight(64, 128, 64, 4))
    assert (made["args"], made["group_size"], made["in_features"], made["out_features"]) == ((4,), 64, 128, 64)
    assert (made["zeros"], made["bias"]) == (8, None)
