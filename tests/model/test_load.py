"""From a model's name to a model that runs."""

import pytest
import torch

from deepinfer_lab.errors import KernelError, ModelNotFound, QuantisationError, SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model import quantised
from deepinfer_lab.model.build import build_block
from deepinfer_lab.model.load import load_model, open_source, pick_device
from deepinfer_lab.model.source import product_shapes
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import PLANS, plan_named


def test_synthetic():
    loaded = load_model("synthetic:tiny", bits="mixed", group=32, device="cpu")
    assert (loaded.name, loaded.bits, loaded.group, loaded.tokenizer) == ("synthetic:tiny", "mixed", 32, None)
    assert loaded.decoder.config == SHAPES["tiny"]
    assert (loaded.decoder.device.type, loaded.decoder.dtype) == ("cpu", torch.float32)


def test_the_same_name_gives_the_same_model():
    def logits() -> torch.Tensor:
        decoder = load_model("synthetic:tiny", device="cpu").decoder
        pool = KVPool(decoder.kv_shape, 1, 16, decoder.device)
        return decoder.forward(StepInput.build([Span([1, 2, 3], 0, [0])], 16, decoder.device), pool)

    torch.manual_seed(1)
    first = logits()
    torch.manual_seed(2)
    assert torch.equal(first, logits())
    assert first.isfinite().all()


@pytest.mark.parametrize("bits", [3, 4])
def test_packed_synthetic_weights_have_the_dense_ones_spread(bits):
    source = SyntheticSource(SHAPES["smollm2-135m"], "synthetic:smollm2-135m")
    weight = source.packed("model.layers.0.mlp.up_proj", bits, 64).dequantise(torch.float32)
    assert weight.shape == (1536, 576)
    assert float(weight.std()) == pytest.approx(576**-0.5, rel=0.01)


@pytest.mark.parametrize("spec", ["synthetic:", "synthetic:huge", "synthetic:Tiny"])
def test_shapes_that_do_not_exist(spec):
    with pytest.raises(ModelNotFound, match=f"'{spec}'.*synthetic:tiny"):
        load_model(spec, device="cpu")


@pytest.mark.parametrize("spec", ["no such model", "./nowhere", "nowhere.gguf"])
def test_models_that_do_not_exist(spec):
    with pytest.raises(ModelNotFound):
        open_source(spec)


def test_a_quantised_folder(tmp_path):
    quantised.write(SyntheticSource(SHAPES["tiny"], "tiny"), plan_named("w3"), 32, tmp_path)
    assert isinstance(open_source(str(tmp_path)), quantised.QuantisedSource)
    assert load_model(str(tmp_path), bits="w3", group=32, device="cpu").name == "tiny"


def test_a_quantised_folder_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    quantised.write(SyntheticSource(SHAPES["tiny"], "tiny"), plan_named("w3"), 32, tmp_path / "model")
    assert isinstance(open_source("~/model"), quantised.QuantisedSource)


@pytest.mark.parametrize("bits", ["", "w2", "4", "W4"])
def test_unknown_bits_are_refused_before_anything_is_opened(bits):
    with pytest.raises(SettingError, match=f"bits '{bits}': allowed are none, w4, w3, mixed"):
        load_model("no such model", bits=bits)


def test_a_group_that_does_not_divide():
    with pytest.raises(QuantisationError, match=r"K = 64 .*group 128"):
        load_model("synthetic:tiny", group=128, device="cpu")


@pytest.mark.parametrize("name", ["", "gpu", "meta", "mps", "cuda:x", "cpu:cpu", "tpu:0"])
def test_devices_that_are_none(name):
    with pytest.raises(SettingError, match=f"device '{name}': allowed are cpu, cuda and cuda:N"):
        pick_device(name)


def test_devices_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(None) == pick_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:0", "cuda:7"):
        with pytest.raises(SettingError, match=f"device '{name}'.*finds no CUDA GPU.*use cpu"):
            pick_device(name)


def test_devices_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(None).type == "cuda"
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(SettingError, match="device 'cuda:2'"):
        pick_device("cuda:2")


def test_a_dispatch_table_must_serve_the_bits(tmp_path):
    table = tmp_path / "dispatch.json"
    table.write_text(
        '{"schema_version": 1, "rows": [{"bits": 4, "m_min": 1, "m_max": null, "kernel": "w4_tiled_gemm"}]}'
    )
    load_model("synthetic:tiny", bits="w4", device="cpu", dispatch=table)
    with pytest.raises(KernelError, match="no kernel for 3-bit weights at M = 1: the dispatch table has 4 bits"):
        load_model("synthetic:tiny", bits="w3", device="cpu", dispatch=table)
    with pytest.raises(KernelError, match=r"missing.json: not a dispatch table"):
        load_model("synthetic:tiny", device="cpu", dispatch=tmp_path / "missing.json")


@pytest.mark.parametrize("spec", ["synthetic:tiny", "synthetic:smollm2-135m"])
def test_the_shapes_to_tune_for_are_those_of_the_built_products(spec):
    source = open_source(spec)
    block = build_block(source, PLANS["w4"], 0, group=32, device=torch.device("cpu"), dtype=torch.float32)
    built = [(layer.n, layer.k) for layer in (block.qkv, block.o, block.gate_up, block.down)]
    assert product_shapes(source.config) == tuple(dict.fromkeys(built))
    assert len(product_shapes(open_source("synthetic:qwen2.5-7b").config)) == 4
