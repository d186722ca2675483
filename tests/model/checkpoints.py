"""Small random checkpoints in the formats that the sources read, written by independent code."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def random_model(architecture: str, **settings: object) -> transformers.PreTrainedModel:
    """A model whose every parameter is random, so that no two tensors can be taken for each other."""
    config_class, model_class = CLASSES[architecture]
    model = model_class(config_class(**{**SIZES, **settings}))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def save_hf(folder: Path, architecture: str, *, shard_size: str = "1GB", **settings: object) -> dict[str, torch.Tensor]:
    """Save a random model as transformers does, and return its parameters by name."""
    model = random_model(architecture, **settings)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return dict(model.named_parameters())


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def byte_vocabulary() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    settings: dict[str, object] | None = None,
    metadata: dict[str, object] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: dict[str, object] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a random model as llama.cpp's converter does, and return its parameters by Hugging Face name.

    `metadata` adds or overrides `{architecture}.*` keys (None leaves one out), `drop` leaves tensors out, `kind` is the
    block format of the matrices, `tokenizer` overrides `tokenizer.ggml.*` keys.
    """
    model = random_model(architecture, **(settings or {}))
    config = model.config
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if architecture == "qwen3":
        keys["attention.key_length"] = keys["attention.value_length"] = config.head_dim
    keys.update(metadata or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, f"{architecture}.{key}", value)
    if tokenizer is not None:
        for key, value in {**tokenizer_metadata(), **tokenizer}.items():
            _add(writer, key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}", value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        target, values = _gguf_name(name), parameter.detach().numpy()
        if target in drop:
            continue
        part = target.split(".")[-2]
        if architecture == "llama" and part in heads:  # the converter's permutation
            shape = values.shape
            values = values.reshape(heads[part], 2, shape[0] // heads[part] // 2, *shape[1:]).swapaxes(1, 2)
            values = np.ascontiguousarray(values.reshape(shape))
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return parameters


def tokenizer_metadata() -> dict[str, object]:
    """`tokenizer.ggml.*` of a byte vocabulary with three merges, a control token and a user-defined one."""
    merged = ["he", "ll", "hell"]
    tokens = [*byte_vocabulary(), *merged, "<|end|>", "<think>"]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 4],
        "merges": ["h e", "l l", "he ll"],
        "eos_token_id": tokens.index("<|end|>"),
    }


def fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like vocabulary as in Llama 2: words begin with U+2581, unknown characters fall back to bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for character in "▁abcdefghijklmnopqrstuvwxyz":
        vocabulary[character] = len(vocabulary)
    merges = [("▁", "h"), ("▁h", "i")]
    vocabulary |= {"▁h": len(vocabulary), "▁hi": len(vocabulary) + 1}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_PARTS[part]}.{suffix}"


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
