"""Hugging Face folders: the config's many spellings, sharded and single weights, and what is refused."""

import json

import pytest
import torch
from checkpoints import edit_json, fallback_tokenizer, save_hf
from safetensors.torch import load_file, save_file

from deepinfer_lab.errors import CheckpointError, ModelNotFound, UnsupportedArchitecture
from deepinfer_lab.model.config import Llama3Scaling
from deepinfer_lab.model.hf_source import HfSource
from deepinfer_lab.model.resolve import resolve

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    save_hf(tmp_path / "tiny", "llama", tie_word_embeddings=True)
    return tmp_path / "tiny"


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"], ids=["single", "sharded"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "head_dim": 24}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    ],
)
def test_tensors_equal_the_saved_model(tmp_path, architecture, settings, shard_size):
    parameters = save_hf(tmp_path, architecture, shard_size=shard_size, **settings)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    source = HfSource(tmp_path)
    for name, parameter in parameters.items():
        assert torch.equal(source.tensor(name), parameter), name
    config = source.config
    assert (config.architecture, config.head_dim) == (architecture, settings.get("head_dim", 16))
    assert config.tied_embeddings == settings["tie_word_embeddings"]
    assert (config.qkv_bias, config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert (config.num_heads, config.num_kv_heads, config.num_layers) == (4, 2, 2)
    tied = parameters["model.embed_tokens.weight"]
    assert torch.equal(source.tensor("lm_head.weight"), parameters.get("lm_head.weight", tied))


def test_stored_dtype_is_kept(folder):
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert HfSource(folder).tensor("model.norm.weight").dtype == torch.bfloat16


def test_attention_bias(tmp_path):
    parameters = save_hf(tmp_path, "llama", attention_bias=True)
    with pytest.raises(UnsupportedArchitecture, match=r"self_attn\.o_proj\.bias"):
        HfSource(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in weights:
        if name.endswith("o_proj.bias"):
            weights[name].zero_()
    save_file(weights, tmp_path / "model.safetensors")
    source = HfSource(tmp_path)
    assert source.config.qkv_bias
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(source.tensor(name), parameters[name])


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_parameters": None}, 10_000.0, None),
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5, None),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, Llama3Scaling(8, 1, 4, 128)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 5e5, Llama3Scaling(8, 1, 4, 128)),
    ],
)
def test_rope_spellings(folder, changes, theta, scaling):
    edit_json(folder / "config.json", **changes)
    config = HfSource(folder).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_config_defaults(folder):
    edit_json(folder / "config.json", head_dim=None, architectures=None, attention_bias=None, rope_parameters=None)
    assert HfSource(folder).config.head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM'; supported are LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear'"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "window of 64 tokens"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "window of 64 tokens"),
        ({"num_key_value_heads": 3}, "4 query heads over 3 KV heads"),
    ],
)
def test_refused_by_name(folder, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedArchitecture, match=message):
        HfSource(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
        {"layer_types": ["full_attention", "full_attention"], "sliding_window": 64, "use_sliding_window": True},
    ],
)
def test_a_sliding_window_that_is_not_in_use(folder, changes):
    edit_json(folder / "config.json", **changes)
    assert HfSource(folder).config.max_context == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "factor is None"),
        ({"vocab_size": 301}, r"'model.embed_tokens.weight' has shape \[300, 64\], expected \[301, 64\]"),
        ({"num_hidden_layers": 3}, r"no tensor 'model.layers.2.input_layernorm.weight'"),
        ({"tie_word_embeddings": False}, r"no tensor 'lm_head.weight'"),
    ],
)
def test_a_config_that_does_not_fit(folder, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        HfSource(folder)


def test_missing_and_broken_config(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty/config\.json: no such file"):
        HfSource(tmp_path / "empty")
    for content, message in (("{", "not readable as JSON"), ("[1]", "a JSON list, expected an object")):
        (folder / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            HfSource(folder)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        HfSource(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep] if keep else path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated, or not a safetensors file"):
        HfSource(folder)


def test_shards(tmp_path):
    save_hf(tmp_path, "qwen2", shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = tmp_path / weight_map["model.layers.1.mlp.up_proj.weight"]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated"):
        HfSource(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: no such file, expected a shard with tensor 'model\."):
        HfSource(tmp_path)
    shard.write_bytes(content)
    edit_json(index, weight_map={**weight_map, "model.norm.weight": "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' in '\.\./elsewhere\.safetensors'"):
        HfSource(tmp_path)
    edit_json(index, weight_map=None)
    with pytest.raises(CheckpointError, match="no 'weight_map'"):
        HfSource(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_missing_or_misshapen_tensor_is_named(folder, name):
    path = folder / "model.safetensors"
    weights = load_file(path)
    original = weights.pop(name)
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=f"{path}: no tensor '{name}'"):
        HfSource(folder)
    save_file({**weights, name: original[:, :-1].contiguous()}, path)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has shape"):
        HfSource(folder)


def test_tensors_that_may_and_may_not_be_ignored(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    harmless = {"lm_head.weight": torch.zeros(300, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file({**weights, **harmless}, path)
    source = HfSource(folder)
    assert torch.equal(source.tensor("lm_head.weight"), weights["model.embed_tokens.weight"])
    save_file({**weights, "model.layers.0.mlp.up_proj.bias": torch.zeros(96)}, path)
    with pytest.raises(UnsupportedArchitecture, match=r"mlp\.up_proj\.bias"):
        HfSource(folder)
    save_file({**weights, "model.norm.weight": torch.zeros(64, dtype=torch.int8)}, path)
    with pytest.raises(UnsupportedArchitecture, match=r"'model\.norm\.weight' is I8"):
        HfSource(folder)


def test_a_name_that_the_model_does_not_have(folder):
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        HfSource(folder).tensor("model.layers.0.self_attn.q_proj.bias")


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, {2}), ([2, 7], None, {2, 7}), (2, [5, 6], {5, 6}), (None, 5, {5}), (None, None, {1})],
)
def test_eos_ids(folder, config_eos, generation_eos, expected):
    fallback_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<s>"}}))
    edit_json(folder / "config.json", eos_token_id=config_eos)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert HfSource(folder).tokenizer.eos_ids == expected


def test_tokenizer_is_optional(folder):
    assert HfSource(folder).tokenizer is None


def test_resolve_opens_a_folder(folder, monkeypatch):
    assert resolve(str(folder)).name == "tiny"
    monkeypatch.chdir(folder.parent.parent)
    assert resolve(f"{folder.parent.name}/tiny").name == "tiny"  # looks like a hub id, but exists
    with pytest.raises(ModelNotFound):
        resolve(str(folder / "nowhere"))
