"""From a weight source to a decoder: fuse what reads the same input, quantise what the plan says."""

from collections.abc import Sequence

import torch

from deepinfer_lab.kernels import dispatch
from deepinfer_lab.model.decoder import Block, Decoder, Linear
from deepinfer_lab.model.source import ATTENTION_IN, ATTENTION_OUT, MLP_IN, MLP_OUT, PackedSource, WeightSource
from deepinfer_lab.progress import bar
from deepinfer_lab.quant import rtn
from deepinfer_lab.quant.layout import PackedWeight, concatenate
from deepinfer_lab.quant.linear import DenseLinear, QuantLinear
from deepinfer_lab.quant.plan import QuantPlan


def packed_weight(source: WeightSource, layer: str, bits: int, group: int) -> PackedWeight:
    """A layer's few-bit weight: as the source holds it, or else rounded to nearest."""
    if isinstance(source, PackedSource):
        return source.packed(layer, bits, group)
    return rtn.quantise(source.tensor(f"{layer}.weight"), bits, group)


def build_decoder(
    source: WeightSource,
    plan: QuantPlan,
    *,
    group: int,
    device: torch.device,
    dtype: torch.dtype,
    table: Sequence[dispatch.Row] = dispatch.ARTICLE,
) -> Decoder:
    """Build a decoder, one block at a time, so that the peak is the result plus one dense layer.

    Args:
        source: where the weights are.
        plan: bits for each layer.
        group: values of K that share a scale, where the plan quantises.
        device, dtype: where the model runs and what it computes in.
        table: which kernel multiplies how many rows with a quantised layer on a GPU.

    Raises:
        CheckpointError, QuantisationError: as the source and the quantiser do.
    """
    config = source.config

    def dense(name: str) -> torch.Tensor:
        return source.tensor(name).to(device, dtype)

    def linear(prefix: str, names: Sequence[str]) -> Linear:
        layers = [f"{prefix}.{name}" for name in names]
        has_bias = config.qkv_bias and names is ATTENTION_IN
        bias = torch.cat([dense(f"{layer}.bias") for layer in layers]) if has_bias else None
        bits = plan.bits_for(layers[0])
        if bits is None:
            return DenseLinear(torch.cat([dense(f"{layer}.weight") for layer in layers]), bias)
        packed = concatenate([packed_weight(source, layer, bits, group) for layer in layers])
        return QuantLinear(packed.to(device), bias, table)

    blocks = []
    for layer in bar(range(config.num_layers), desc=f"loading {source.name}", unit="layer"):
        prefix = f"model.layers.{layer}"
        blocks.append(
            Block(
                input_norm=dense(f"{prefix}.input_layernorm.weight"),
                qkv=linear(prefix, ATTENTION_IN),
                q_norm=dense(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
                k_norm=dense(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
                o=linear(prefix, ATTENTION_OUT),
                post_norm=dense(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=linear(prefix, MLP_IN),
                down=linear(prefix, MLP_OUT),
            )
        )
    embed = dense("model.embed_tokens.weight")
    head = embed if config.tied_embeddings else dense("lm_head.weight")
    return Decoder(config, embed, blocks, dense("model.norm.weight"), DenseLinear(head))
