"""A model that was quantised once gives the same answers as one that is quantised while loading."""

import dataclasses
import json

import pytest
import tokenizers
import torch
from checkpoints import byte_vocabulary
from safetensors.torch import load_file, save_file

from deepinfer_lab.errors import CheckpointError, QuantisationError, SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model import quantised
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.config import Llama3Scaling
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.source import PackedSource
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant import checkpoint
from deepinfer_lab.quant.plan import plan_named

CPU = torch.device("cpu")


class DenseSource:
    """A source that holds no packed weights, so that rounding happens here. Untied, biased, with scaled rotary embedding."""

    def __init__(self, tokenizer: Tokenizer | None = None, **changes: object) -> None:
        scaling = Llama3Scaling(8.0, 1.0, 4.0, 128)
        self.config = dataclasses.replace(
            SHAPES["tiny"], qkv_bias=True, qk_norm=True, tied_embeddings=False, rope_scaling=scaling, **changes
        )
        self.name, self.tokenizer = "dense", tokenizer
        self._inner = SyntheticSource(self.config, "dense")

    def tensor(self, name: str) -> torch.Tensor:
        return self._inner.tensor(name)


def logits(source: object, bits: str, group: int = 64) -> torch.Tensor:
    decoder = build_decoder(source, plan_named(bits), group=group, device=CPU, dtype=torch.float32)
    pool = KVPool(decoder.kv_shape, 2, 16, CPU)
    return decoder.forward(StepInput.build([Span(list(range(20)), 0, [1, 0], all_logits=True)], 16, CPU), pool)


def rewrite(file, change) -> None:
    """Apply `change(tensors, metadata)` to a checkpoint on disk."""
    held = checkpoint.load(file)
    tensors = load_file(file)
    layers = {n: {"bits": w.bits, "group": w.group, "n": w.n, "k": w.k} for n, w in held.packed.items()}
    metadata = {"format": checkpoint.FORMAT, "layers": json.dumps(layers), **held.metadata}
    change(tensors, metadata)
    save_file(tensors, file, metadata=metadata)


def test_the_source_of_these_tests_holds_nothing_packed():
    assert not isinstance(DenseSource(), PackedSource)


@pytest.mark.parametrize("bits", ["w4", "w3", "mixed", "none"])
@pytest.mark.parametrize("group", [32, 64])
def test_same_logits_as_quantising_while_loading(tmp_path, bits, group):
    source = DenseSource()
    quantised.write(source, plan_named(bits), group, tmp_path)
    read = quantised.QuantisedSource(tmp_path)
    assert read.config == source.config
    assert read.name == source.name
    assert torch.equal(logits(read, bits, group), logits(source, bits, group))


def test_writing_again_what_is_quantised_already(tmp_path):
    quantised.write(DenseSource(), plan_named("mixed"), 64, tmp_path / "first")
    quantised.write(quantised.QuantisedSource(tmp_path / "first"), plan_named("mixed"), 64, tmp_path / "second")
    first, second = (load_file(tmp_path / name / quantised.FILE) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    with pytest.raises(SettingError, match=r"data': holds other files; allowed are a new folder"):
        quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine.txt"]
    first = quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path / "w4").read_bytes()
    for plan, group, said in (("w3", 64, "plan w4"), ("w4", 32, "group 64")):
        with pytest.raises(SettingError, match=rf"w4': holds a model of {said}; delete it first"):
            quantised.write(DenseSource(), plan_named(plan), group, tmp_path / "w4")
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path / "w4")  # the same once more
    (tmp_path / "w4" / quantised.FILE).write_bytes(first[:100])  # cut off
    quantised.write(DenseSource(), plan_named("w3"), 64, tmp_path / "w4")
    assert checkpoint.header(tmp_path / "w4" / quantised.FILE)["plan"] == "w3"


def test_the_tokenizer_comes_along(tmp_path):
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(byte_vocabulary())}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend, eos_ids=[7, 3], chat_template="{{ messages[0].content }}!")
    quantised.write(DenseSource(tokenizer), plan_named("w4"), 64, tmp_path)
    read = load_model(str(tmp_path), bits="w4", device="cpu").tokenizer
    assert read.encode("naïve 双") == tokenizer.encode("naïve 双")
    assert read.eos_ids == {3, 7}
    assert read.render_chat([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_without_a_tokenizer(tmp_path):
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    assert quantised.QuantisedSource(tmp_path).tokenizer is None


def test_is_quantised(tmp_path):
    assert not quantised.is_quantised(tmp_path)
    assert not quantised.is_quantised(tmp_path / "nowhere")
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    assert quantised.is_quantised(tmp_path)


@pytest.mark.parametrize(("bits", "group"), [("w3", 64), ("mixed", 64), ("w4", 32)])
def test_loading_with_other_bits_or_group(tmp_path, bits, group):
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    with pytest.raises(QuantisationError, match=r"4 bits, group 64 \(plan 'w4'\), not as"):
        load_model(str(tmp_path), bits=bits, group=group, device="cpu")


def test_loading_densely_what_is_quantised(tmp_path):
    quantised.write(DenseSource(), plan_named("w3"), 64, tmp_path)
    with pytest.raises(QuantisationError, match="plan 'w3'; load it with bits=w3"):
        load_model(str(tmp_path), bits="none", device="cpu")


def test_a_group_that_does_not_divide(tmp_path):
    with pytest.raises(QuantisationError, match=r"K = 64 .*group 128.*32, 64"):
        quantised.write(DenseSource(), plan_named("w4"), 128, tmp_path)
    assert not quantised.is_quantised(tmp_path)


@pytest.mark.parametrize("missing", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.bias"])
def test_a_dense_tensor_that_is_missing(tmp_path, missing):
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    rewrite(tmp_path / quantised.FILE, lambda tensors, _metadata: tensors.pop(missing))
    with pytest.raises(CheckpointError, match=missing):
        load_model(str(tmp_path), bits="w4", device="cpu")


def test_a_layer_that_is_missing_altogether(tmp_path):
    """Neither packed nor dense: that is damage, not another choice of bits."""
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    layer = "model.layers.1.mlp.down_proj"

    def remove(tensors, metadata):
        del tensors[f"{layer}.packed"], tensors[f"{layer}.scales"]
        layers = json.loads(metadata["layers"])
        del layers[layer]
        metadata["layers"] = json.dumps(layers)

    rewrite(tmp_path / quantised.FILE, remove)
    with pytest.raises(CheckpointError, match=layer):
        load_model(str(tmp_path), bits="w4", device="cpu")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_dense_tensor_of_another_shape(tmp_path, name):
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)

    def shorten(tensors, _metadata):
        tensors[name] = tensors[name][:-1].clone()

    rewrite(tmp_path / quantised.FILE, shorten)
    with pytest.raises(CheckpointError, match=name):
        load_model(str(tmp_path), bits="w4", device="cpu")


@pytest.mark.parametrize("key", ["name", "plan", "config"])
def test_a_header_without(tmp_path, key):
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    rewrite(tmp_path / quantised.FILE, lambda _tensors, metadata: metadata.pop(key))
    with pytest.raises(CheckpointError, match=f"damaged header.*{key}"):
        quantised.QuantisedSource(tmp_path)


@pytest.mark.parametrize(
    "config", ["", "{", "[]", "3", '"x"', "{}", '{"rope_scaling": null}', '{"rope_scaling": {"a": 1}}']
)
def test_a_config_that_is_none(tmp_path, config):
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    rewrite(tmp_path / quantised.FILE, lambda _tensors, metadata: metadata.update(config=config))
    with pytest.raises(CheckpointError, match=quantised.FILE):
        quantised.QuantisedSource(tmp_path)


def test_a_truncated_file(tmp_path):
    quantised.write(DenseSource(), plan_named("w4"), 64, tmp_path)
    file = tmp_path / quantised.FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=quantised.FILE):
        load_model(str(tmp_path), bits="w4", device="cpu")
