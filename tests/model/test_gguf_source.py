"""GGUF: every tensor in Hugging Face's orientation, and a name for everything that is wrong with a file."""

import struct

import gguf
import numpy as np
import pytest
import torch
from checkpoints import tokenizer_metadata, write_gguf

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.config import Llama3Scaling
from deepinfer_lab.model.gguf_file import GgufFile
from deepinfer_lab.model.gguf_source import GgufSource
from deepinfer_lab.model.resolve import resolve


@pytest.fixture(scope="module")
def reader(smollm2_path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_path)


def test_real_model_equals_transformers(smollm2_path, reader, tmp_path):
    """Against the first two layers, cut out into a file of their own: transformers takes a minute for all thirty."""
    from transformers import AutoModelForCausalLM

    writer = gguf.GGUFWriter(tmp_path / "two.gguf", "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            value = 2 if key == "llama.block_count" else field.contents()
            writer.add_key_value(key, value, field.types[0])
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or tensor.name.startswith(("blk.0.", "blk.1.")):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="two.gguf", dtype=torch.float32)
    source = GgufSource(smollm2_path)
    parameters = dict(reference.named_parameters())
    assert len(parameters) == 2 + 2 * 9
    for name, parameter in parameters.items():
        assert torch.equal(source.tensor(name), parameter), name
    assert source.config.num_layers == 30
    assert source.config.rope_theta == reference.config.rope_parameters["rope_theta"] == 100_000
    assert source.config.rms_norm_eps == 1e-5
    assert source.config.tied_embeddings
    assert torch.equal(source.tensor("lm_head.weight"), reference.lm_head.weight)


def test_header_equals_the_gguf_package(smollm2_path, reader):
    ours = GgufFile(smollm2_path)
    assert set(ours.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
    for key, value in ours.metadata.items():
        assert value == reader.fields[key].contents(), key
    assert len(ours.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        info = ours.tensors[tensor.name]
        assert (info.shape, info.offset, info.nbytes, info.kind) == (
            tuple(tensor.shape[::-1].tolist()), tensor.data_offset, tensor.n_bytes, tensor.tensor_type,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    ],
)
def test_tensors_come_back_as_they_were(tmp_path, architecture, settings):
    bias = settings.get("attention_bias", False)
    drop = tuple(f"blk.{i}.attn_output.bias" for i in range(2)) if bias else ()
    parameters = write_gguf(tmp_path / "m.gguf", architecture, settings=settings, drop=drop)
    source = GgufSource(tmp_path / "m.gguf")
    for name, parameter in parameters.items():
        if not name.endswith("o_proj.bias"):
            assert torch.equal(source.tensor(name), parameter), name
    config = source.config
    assert config.architecture == architecture
    assert config.tied_embeddings == ("lm_head.weight" not in parameters)
    assert config.qk_norm == (architecture == "qwen3")
    assert config.qkv_bias == (bias or architecture == "qwen2")
    assert config.head_dim == settings.get("head_dim", 16)
    assert config.num_kv_heads == settings.get("num_key_value_heads", 2)
    assert (config.vocab_size, config.max_context, config.rms_norm_eps) == (300, 512, 1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16", "BF16"])
def test_block_formats(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    parameters = write_gguf(tmp_path / "m.gguf", "qwen2", kind=kind)
    name = "model.layers.1.mlp.up_proj.weight"
    original = parameters[name].detach().numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
    found = GgufSource(tmp_path / "m.gguf").tensor(name)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), expected)
    assert not np.array_equal(expected, original)


def test_a_tensor_can_be_written_to(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    source = GgufSource(tmp_path / "m.gguf")
    first = source.tensor("model.norm.weight")
    before = first.clone()
    first.zero_()
    assert torch.equal(source.tensor("model.norm.weight"), before)


def llama3_divisors(factor: float, theta: float = 500_000.0, head_dim: int = 16) -> np.ndarray:
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_scaling(tmp_path):
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    extra = {"rope_freqs.weight": llama3_divisors(32.0)}
    write_gguf(tmp_path / "m.gguf", settings=settings, extra=extra)
    config = GgufSource(tmp_path / "m.gguf").config
    assert config.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 500_000


def test_rope_divisors_of_one_are_no_scaling(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    assert GgufSource(tmp_path / "m.gguf").config.rope_scaling is None


def test_other_rope_divisors_are_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)})
    with pytest.raises(UnsupportedArchitecture, match=r"rope_freqs\.weight"):
        GgufSource(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, r"llama\.expert_count is 8"),
        ({"rope.scaling.type": "yarn"}, r"rope\.scaling\.type is 'yarn'"),
        ({"attention.sliding_window": 128}, "sliding_window is 128"),
        ({"rope.dimension_count": 8}, r"rope\.dimension_count is 8"),
        ({"feed_forward_length": [96, 48]}, "differs between layers"),
    ],
)
def test_features_that_the_decoder_lacks(tmp_path, metadata, message):
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(UnsupportedArchitecture, match=message):
        GgufSource(tmp_path / "m.gguf")


def test_an_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitecture, match="'gemma'; supported are llama, qwen2, qwen3"):
        GgufSource(tmp_path / "m.gguf")


def test_an_extra_bias_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", settings={"attention_bias": True})
    with pytest.raises(UnsupportedArchitecture, match=r"blk\.0\.attn_output\.bias"):
        GgufSource(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_up.weight", "token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"]
)
def test_a_missing_tensor_is_named(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", drop=(name,))
    with pytest.raises(CheckpointError, match=f"m.gguf: no tensor '{name}'"):
        GgufSource(tmp_path / "m.gguf")


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "context_length"])
def test_a_missing_key_is_named(tmp_path, key):
    write_gguf(tmp_path / "m.gguf", metadata={key: None})
    with pytest.raises(CheckpointError, match=rf"no 'llama\.{key}' in the metadata"):
        GgufSource(tmp_path / "m.gguf")


def test_a_wrong_shape_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", metadata={"feed_forward_length": 128})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_gate\.weight' has shape \[96, 64\], expected \[128, 64\]"):
        GgufSource(tmp_path / "m.gguf")


def test_a_name_that_the_model_does_not_have(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        GgufSource(tmp_path / "m.gguf").tensor("model.layers.9.mlp.up_proj.weight")


def test_truncation_anywhere_is_a_checkpoint_error(tmp_path):
    whole = tmp_path / "m.gguf"
    write_gguf(whole, tokenizer={})
    data = whole.read_bytes()
    header = GgufFile(whole).tensors["token_embd.weight"].offset
    cuts = [0, 3, 4, 6, 20, *range(24, header, 211), header, len(data) // 2, len(data) - 64]
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: (truncated|not a GGUF file)"):
            GgufSource(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "GGUF version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown metadata type 77"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff") + bytes(16), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**40), "truncated"),
    ],
)
def test_files_that_are_no_gguf(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufSource(tmp_path / "bad.gguf")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        GgufSource(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        GgufSource(tmp_path / "folder.gguf")


def test_tokenizer_is_read_from_the_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", tokenizer={})
    source = GgufSource(tmp_path / "m.gguf")
    assert source.tokenizer.vocab_size == len(tokenizer_metadata()["tokens"])
    assert source.tokenizer is source.tokenizer
    write_gguf(tmp_path / "bare.gguf")
    assert GgufSource(tmp_path / "bare.gguf").tokenizer is None


def test_resolve_opens_a_file_by_path(tmp_path):
    write_gguf(tmp_path / "mine.gguf", "qwen3")
    source = resolve(str(tmp_path / "mine.gguf"))
    assert (source.name, source.config.architecture) == ("mine", "qwen3")
