"""What the decoder asks of a checkpoint, whatever its format: a config, named tensors, and perhaps a tokenizer."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant.layout import PackedWeight

# The linear layers of a block, grouped by the input that they share.
ATTENTION_IN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION_OUT = ("self_attn.o_proj",)
MLP_IN = ("mlp.gate_proj", "mlp.up_proj")
MLP_OUT = ("mlp.down_proj",)


class WeightSource(Protocol):
    """A checkpoint that is open for reading. Tensors have Hugging Face's names and orientation (rotate-half RoPE)."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in a float dtype; projections are [out_features, in_features].

        Raises:
            CheckpointError: the checkpoint has no such tensor, or its bytes cannot be read.
        """
        ...


@runtime_checkable
class PackedSource(Protocol):
    """A weight source that holds its linear layers in few-bit form already."""

    def packed(self, layer: str, bits: int, group: int) -> PackedWeight:
        """The weight of `layer` (a name without `.weight`)."""
        ...


def linear_layers(config: ModelConfig) -> Iterator[str]:
    """The full name of every linear layer inside the blocks, without `.weight`, in the order of the forward pass."""
    for index in range(config.num_layers):
        for name in (*ATTENTION_IN, *ATTENTION_OUT, *MLP_IN, *MLP_OUT):
            yield f"model.layers.{index}.{name}"


def linear_shape(config: ModelConfig, layer: str) -> tuple[int, int]:
    """[N, K] = (out_features, in_features) of a block's linear layer, such as `model.layers.0.mlp.up_proj`."""
    return {
        "q_proj": (config.q_size, config.hidden_size),
        "k_proj": (config.kv_size, config.hidden_size),
        "v_proj": (config.kv_size, config.hidden_size),
        "o_proj": (config.hidden_size, config.q_size),
        "gate_proj": (config.intermediate_size, config.hidden_size),
        "up_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }[layer.rsplit(".", 1)[-1]]


def product_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """The different [N, K] that a block's products have, once layers that read the same input are one product (`build.py`)."""
    shapes = []
    for names in (ATTENTION_IN, ATTENTION_OUT, MLP_IN, MLP_OUT):
        each = [linear_shape(config, name) for name in names]
        shapes.append((sum(n for n, _ in each), each[0][1]))
    return tuple(dict.fromkeys(shapes))


def dense_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that is no block's linear weight: embeddings, head, norms and biases."""
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (config.hidden_size,)
        yield f"{layer}.post_attention_layernorm.weight", (config.hidden_size,)
        if config.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (config.head_dim,)
        if config.qkv_bias:
            for name in ATTENTION_IN:
                yield f"{layer}.{name}.bias", linear_shape(config, name)[:1]
