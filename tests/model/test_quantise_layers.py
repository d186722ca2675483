"""A whole model quantised layer by layer: what calibration sees, what is kept, and how an interrupted run goes on."""

import dataclasses
import itertools

import pytest
import torch
from torch.nn.functional import rms_norm

from deepinfer_lab.errors import QuantisationError, SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model import quantised
from deepinfer_lab.model.build import build_block, build_decoder, build_outside
from deepinfer_lab.model.calibration import LINEARS, Calibration, Passage, calibration_from
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.quantise import PackedModel, quantise_layers
from deepinfer_lab.model.source import linear_layers
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant import checkpoint, rtn
from deepinfer_lab.quant.plan import PLANS, LayerPlan, plan_named, save_plan

CPU = torch.device("cpu")
WHERE = {"device": CPU, "dtype": torch.float32}


class DenseSource:
    """The tiny shape with dense tensors alone, as a float checkpoint is."""

    tokenizer = None

    def __init__(self, **changes: object) -> None:
        self.config = dataclasses.replace(SHAPES["tiny"], num_layers=3, tied_embeddings=False, **changes)
        self.name = "dense"
        self._source = SyntheticSource(self.config, "dense")

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(name)


@pytest.fixture(scope="module")
def source() -> DenseSource:
    return DenseSource()


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    random = torch.Generator().manual_seed(1)
    return Calibration(tuple(tuple(torch.randint(0, 256, (40,), generator=random).tolist()) for _ in range(8)))


def blocks(source, plan=PLANS["none"]):
    return [build_block(source, plan, i, group=32, **WHERE) for i in range(source.config.num_layers)]


def logits(model, window) -> torch.Tensor:
    pool = KVPool(model.kv_shape, 3, 16, CPU)
    return model.forward(StepInput.build([Span(window, 0, range(3), all_logits=True)], 16, CPU), pool)


@torch.inference_mode()
def test_texts_pass_block_by_block_as_in_the_whole_model(source, calibration):
    whole = build_decoder(source, PLANS["none"], group=32, **WHERE)
    outside = build_outside(source, PLANS["none"], group=32, **WHERE)
    passage = Passage(outside, calibration)
    for block in blocks(source):
        passage.move(block)
    for window, state in zip(calibration.windows, passage._states, strict=True):
        final = rms_norm(state, whole._norm.shape, whole._norm, source.config.rms_norm_eps)
        assert torch.allclose(whole._lm_head(final), logits(whole, window), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_grams_are_of_the_inputs(source, calibration):
    outside = build_outside(source, PLANS["none"], group=32, **WHERE)
    passage = Passage(outside, calibration)
    (first, *_rest) = blocks(source)
    grams = passage.observe(first, move=False)
    assert grams.keys() == set(LINEARS)
    tokens = torch.tensor(calibration.windows).flatten()
    x = rms_norm(outside.embed(tokens), (64,), first.input_norm, source.config.rms_norm_eps)
    assert torch.allclose(grams["qkv"], x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    assert {name: len(gram) for name, gram in grams.items()} == {"qkv": 64, "o": 64, "gate_up": 64, "down": 128}
    again = passage.observe(first, move=True)
    assert all(torch.equal(grams[name], again[name]) for name in LINEARS)  # the texts had stayed
    assert not torch.allclose(passage.observe(first, move=True)["qkv"], grams["qkv"])


def test_texts_begin_with_the_embedding_that_the_plan_makes(source, calibration):
    """Where blocks see what was quantised before them."""

    def first(bits: str, *, sequential: bool) -> torch.Tensor:
        settings = {"group": 32, "method": "gptq", "calibration": calibration, "sequential": sequential}
        return next(quantise_layers(source, PLANS[bits], **settings))[1].dequantise(torch.float32)

    assert torch.equal(first("w4-all", sequential=False), first("w4", sequential=False))
    assert not torch.equal(first("w4-all", sequential=True), first("w4", sequential=True))


def test_rounding_needs_no_texts(source):
    found = dict(quantise_layers(source, PLANS["mixed"], group=32, method="rtn"))
    assert list(found) == list(linear_layers(source.config))
    for layer, weight in found.items():
        assert weight.bits == (3 if ".mlp." in layer else 4)
        assert torch.equal(weight.packed, rtn.quantise(source.tensor(f"{layer}.weight"), weight.bits, 32).packed)


@pytest.mark.parametrize("bits", ["w4", "w3"])
def test_better_methods_keep_the_model_closer(source, calibration, bits):
    """On texts that were not read while quantising."""
    plan, whole = plan_named(bits), build_decoder(source, PLANS["none"], group=32, **WHERE)
    random = torch.Generator().manual_seed(2)
    windows = [torch.randint(0, 256, (48,), generator=random).tolist() for _ in range(6)]
    errors = {}
    for method in ("rtn", "scale-search", "gptq"):
        packed = dict(quantise_layers(source, plan, group=32, method=method, calibration=calibration))
        model = build_decoder(PackedModel(source, packed), plan, group=32, **WHERE)
        with torch.inference_mode():
            errors[method] = sum(float((logits(model, w) - logits(whole, w)).square().sum()) for w in windows)
    assert errors["gptq"] < errors["scale-search"] < errors["rtn"]


def test_later_blocks_see_what_earlier_ones_make_of_the_texts(source, calibration):
    settings = {"group": 32, "method": "gptq", "calibration": calibration}
    after, beside = (
        dict(quantise_layers(source, PLANS["w3"], sequential=sequential, **settings)) for sequential in (True, False)
    )
    same = {layer: torch.equal(after[layer].packed, beside[layer].packed) for layer in after}
    assert all(same[layer] for layer in same if ".layers.0." in layer)
    assert not any(same[layer] for layer in same if ".layers.2." in layer)


def test_only_what_the_plan_names(source, calibration):
    plan = LayerPlan("one", {"model.layers.1.mlp.down_proj": 3})
    found = dict(quantise_layers(source, plan, group=64, method="gptq", calibration=calibration))
    assert {layer: (w.bits, w.group) for layer, w in found.items()} == {"model.layers.1.mlp.down_proj": (3, 64)}


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("stop", [1, 7, 12, 20])
def test_an_interrupted_run_goes_on(source, calibration, tmp_path, monkeypatch, method, stop):
    """Whatever was finished is not done again, and the result is what it would have been."""
    settings = {"method": method, "calibration": calibration}
    whole = quantised.write(source, PLANS["w4"], 32, tmp_path / "whole", **settings)
    done = []
    original = quantised.quantise_layers

    def counted(*args, stop_at=None, **more):
        for layer, weight in itertools.islice(original(*args, **more), stop_at):
            done.append(layer)
            yield layer, weight
        if stop_at is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(quantised, "quantise_layers", lambda *a, **k: counted(*a, stop_at=stop, **k))
    with pytest.raises(KeyboardInterrupt):
        quantised.write(source, PLANS["w4"], 32, tmp_path / "parts", **settings)
    monkeypatch.setattr(quantised, "quantise_layers", counted)
    parts = quantised.write(source, PLANS["w4"], 32, tmp_path / "parts", **settings)
    assert sorted(done) == sorted(linear_layers(source.config))
    found, expected = (checkpoint.load(path) for path in (parts, whole))
    assert found.metadata == expected.metadata
    assert found.packed.keys() == expected.packed.keys()
    assert all(torch.equal(found.packed[layer].packed, weight.packed) for layer, weight in expected.packed.items())
    assert all(torch.equal(found.packed[layer].scales, weight.scales) for layer, weight in expected.packed.items())
    assert {path.name for path in parts.parent.iterdir()} == {quantised.FILE}


def test_layers_of_other_settings_are_not_taken_up(source, tmp_path):
    def folder(**settings):
        return quantised.Unfinished(tmp_path, {"plan": "w4", **settings})

    weight = rtn.quantise(torch.ones(2, 32), 4, 32)
    folder(method="rtn").add("model.layers.0.mlp.up_proj", weight)
    assert folder(method="rtn").layers.keys() == {"model.layers.0.mlp.up_proj"}
    assert folder(method="gptq").layers == {}
    (tmp_path / "model.layers.1.safetensors").write_bytes(b"cut off")
    resumed = folder(method="rtn")
    resumed.add("model.layers.0.mlp.gate_proj", weight)
    assert folder(method="rtn").layers.keys() == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"}


def test_what_cannot_be_calibrated(source, tmp_path):
    with pytest.raises(SettingError, match="method 'gptq': 'dense' has no tokenizer to make calibration texts with"):
        next(quantise_layers(source, PLANS["w4"], group=32, method="gptq"))
    with pytest.raises(SettingError, match="method 'awq': allowed are rtn, scale-search, gptq"):
        next(quantise_layers(source, PLANS["w4"], group=32, method="awq"))
    quantised.write(source, PLANS["w4"], 32, tmp_path)
    with pytest.raises(SettingError, match="method 'gptq': 'dense' is quantised already"):
        next(quantise_layers(quantised.QuantisedSource(tmp_path), PLANS["w4"], group=32, method="gptq"))
    with pytest.raises(SettingError, match="method 'fast'"):
        load_model("synthetic:tiny", method="fast", device="cpu")


def test_windows_are_cut_from_the_text():
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    found = calibration_from(Letters(), "abcdefghij", windows=2, length=3, skip=2)
    assert found.windows == ((99, 100, 101), (102, 103, 104))
    with pytest.raises(SettingError, match=r"calibration text of 8 tokens: 3 windows of 3 need 9"):
        calibration_from(Letters(), "abcdefghij", windows=3, length=3, skip=2)


def test_a_plan_by_layer_is_saved_and_read(source, tmp_path):
    plan = LayerPlan("best", {layer: 3 if "down" in layer else 4 for layer in linear_layers(source.config)})
    save_plan(plan, tmp_path / "plan.json")
    read = plan_named(str(tmp_path / "plan.json"))
    assert read == plan
    packed = dict(quantise_layers(source, read, group=32, method="rtn"))
    model = build_decoder(PackedModel(source, packed), read, group=32, **WHERE)
    assert model.linear_bytes == sum(weight.nbytes for weight in packed.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a plan"), ('{"name": "x"}', "not a plan"), ('{"name": "x", "bits": [1]}', "not a plan"),
        ('{"name": "x", "bits": {"a": 5}}', "a has 5 bits; allowed are 3, 4 and null"),
    ],
)  # fmt: skip
def test_files_that_are_no_plans(tmp_path, text, said):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=said):
        plan_named(str(path))


def test_parts_of_one_product_must_agree(source):
    plan = LayerPlan("torn", {"model.layers.0.self_attn.q_proj": 4})
    with pytest.raises(QuantisationError, match=r"plan 'torn': .*q_proj, .*k_proj, .*v_proj are one product"):
        build_decoder(source, plan, group=32, **WHERE)
