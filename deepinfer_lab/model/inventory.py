"""Which tensors a checkpoint must hold for its config, and the check that it holds them and nothing else."""

from collections.abc import Mapping

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.config import ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config consists of, with its shape ([out_features, in_features] for projections).

    `lm_head.weight` is listed only where embeddings are not tied.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for projection, rows in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
            shapes[f"{attention}.{projection}_proj.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{attention}.{projection}_proj.bias"] = (rows,)
        shapes[f"{attention}.o_proj.weight"] = (hidden, config.q_size)
        if config.qk_norm:
            shapes[f"{attention}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def check_inventory(where: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare shapes by tensor name, in whatever naming both arguments share.

    Args:
        where: the file or folder, for messages.
        expected: what the decoder will read.
        found: what the checkpoint holds, less what may be ignored.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        UnsupportedArchitecture: a tensor that the decoder would not use, such as an extra bias: dropping it would
            change the model's answers.
    """
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: no tensor '{name}', expected with shape {list(shape)}")
        if tuple(found[name]) != shape:
            raise CheckpointError(f"{where}: tensor '{name}' has shape {list(found[name])}, expected {list(shape)}")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise UnsupportedArchitecture(
            f"{where}: {len(extra)} tensors that the decoder does not use, such as '{extra[0]}'"
        )
