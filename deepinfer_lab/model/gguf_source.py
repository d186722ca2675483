"""A weight source that reads llama.cpp's GGUF files: Llama, Qwen2 and Qwen3, in any block format that `gguf` dequantises.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.config import Architecture, Llama3Scaling, ModelConfig
from deepinfer_lab.model.gguf_file import GgufFile
from deepinfer_lab.model.inventory import check_inventory, tensor_shapes
from deepinfer_lab.model.tokenizer import Tokenizer

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
# Features that change the forward pass, and the value that means "absent".
FEATURES = {
    "expert_count": 0, "attention.sliding_window": 0, "rope.scaling.type": "none", "attention.scale": 0.0,
    "logit_scale": 0.0, "attention.causal": True,
}  # fmt: skip
# All that Meta published with RoPE scaling share these two bands; the factor is 8 (Llama 3.1) or 32 (Llama 3.2).
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


class GgufSource:
    """Reads one GGUF file. Tensors come as float32.

    Args:
        path: the file. It stays mapped while this object lives.
        name: how the model is called in messages and records; the file's stem by default.

    Raises:
        CheckpointError: as `GgufFile` does, or metadata or a tensor is missing or of another shape than expected.
        UnsupportedArchitecture: another model family, or a feature that the decoder does not implement.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = path.stem if name is None else name
        self._file = GgufFile(path)
        self.config = _config(self._file)
        self._shapes = tensor_shapes(self.config)
        found = {key: info.shape for key, info in self._file.tensors.items() if key != ROPE_FACTORS}
        check_inventory(str(path), {_gguf_name(key): shape for key, shape in self._shapes.items()}, found)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer inside the file; None where there is none.

        Raises:
            CheckpointError, UnsupportedArchitecture: as `Tokenizer.from_gguf` does.
        """
        if "tokenizer.ggml.model" not in self._file.metadata:
            return None
        return Tokenizer.from_gguf(self._file.metadata, str(self._file.path))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name, float32 on the CPU, rows in Hugging Face's order.

        `lm_head.weight` of a model with tied embeddings is the embedding.

        Raises:
            CheckpointError: the model has no such tensor.
        """
        if name == "lm_head.weight" and self.config.tied_embeddings:
            name = "model.embed_tokens.weight"
        if name not in self._shapes:
            raise CheckpointError(f"{self._file.path}: a model of this config has no tensor '{name}'")
        values = self._file.read(_gguf_name(name))
        if self.config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _halves_from_pairs(values, self.config.head_dim)
        return torch.from_numpy(values)


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    module, suffix = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"


def _halves_from_pairs(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo the row order of llama-architecture files, in each head of a Q or K weight [rows, K] or bias [rows].

    There RoPE turns neighbouring rows (2i, 2i + 1) together; in Hugging Face's order it turns rows i and i + head_dim/2.
    """
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in get_args(Architecture):
        raise UnsupportedArchitecture(
            f"{file.path}: architecture '{architecture}'; supported are {', '.join(get_args(Architecture))}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise CheckpointError(f"{file.path}: one of {file.metadata['split.count']} split files; merge them first")
    for key, absent in FEATURES.items():
        value = file.metadata.get(f"{architecture}.{key}", absent)
        if value != absent:
            raise UnsupportedArchitecture(f"{file.path}: {architecture}.{key} is {value!r}, supported is {absent!r}")

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{file.path}: no '{architecture}.{key}' in the metadata")
        if isinstance(value, list):  # some writers give one value a layer
            if len(set(value)) != 1:
                raise UnsupportedArchitecture(f"{file.path}: {architecture}.{key} differs between layers: {value}")
            value = value[0]
        if not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{file.path}: {architecture}.{key} is {value!r}, expected a positive number")
        return value

    for name in (EMBEDDING, "blk.0.attn_q.weight"):
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: no tensor '{name}'")
    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise UnsupportedArchitecture(f"{file.path}: {key} is {get(key)}, supported is head_dim, {head_dim}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors[EMBEDDING].shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=get("context_length"),
        # The file holds a float32; its shortest decimal spelling is the number that the model's author wrote.
        rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        rope_theta=float(str(np.float32(get("rope.freq_base", 10_000.0)))),
        rope_scaling=_rope_scaling(file, head_dim, get("rope.freq_base", 10_000.0)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_embeddings=HEAD not in file.tensors,
    )


def _rope_scaling(file: GgufFile, head_dim: int, theta: float) -> Llama3Scaling | None:
    """Llama 3's scaling, which GGUF keeps as one divisor a frequency [head_dim/2] and not by its parameters.

    The largest divisor is the factor. The bands are the published ones, and the divisors must follow from them.
    """
    if ROPE_FACTORS not in file.tensors:
        return None
    divisors = file.read(ROPE_FACTORS).reshape(-1)
    if np.all(divisors == 1):
        return None
    scaling = Llama3Scaling(float(divisors.max()), LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (LLAMA3_CONTEXT / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = smooth.clip(0, 1)
    expected = 1 / ((1 - smooth) / scaling.factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise UnsupportedArchitecture(
            f"{file.path}: '{ROPE_FACTORS}' is not Llama 3 scaling with bands {LLAMA3_LOW} and {LLAMA3_HIGH} "
            f"over {LLAMA3_CONTEXT} tokens, the only one supported in a GGUF file"
        )
    return scaling
