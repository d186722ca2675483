"""From a weight source to a decoder: fuse what reads the same input, quantise what the plan says."""

from collections.abc import Sequence

import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.kernels import dispatch
from deepinfer_lab.model import invariance
from deepinfer_lab.model.decoder import Block, Decoder, Linear
from deepinfer_lab.model.embedding import DenseEmbedding, PackedEmbedding
from deepinfer_lab.model.ops import CudaOps
from deepinfer_lab.model.source import ATTENTION_IN, ATTENTION_OUT, MLP_IN, MLP_OUT, PackedSource, WeightSource
from deepinfer_lab.progress import bar
from deepinfer_lab.quant import rtn
from deepinfer_lab.quant.interleave import interleave
from deepinfer_lab.quant.layout import PackedWeight, concatenate
from deepinfer_lab.quant.linear import DenseLinear, QuantLinear, fused_rows
from deepinfer_lab.quant.plan import EMBEDDING, HEAD, Plan

ROWS_AT_ONCE = 16_384  # of a table that is rounded: rounding wants float32 copies, of 7B's tables 2 GiB each


def packed_weight(source: WeightSource, layer: str, bits: int, group: int) -> PackedWeight:
    """A layer's few-bit weight: as the source holds it, or else rounded to nearest."""
    if isinstance(source, PackedSource):
        return source.packed(layer, bits, group)
    return rtn.quantise(source.tensor(f"{layer}.weight"), bits, group)


def build_decoder(
    source: WeightSource,
    plan: Plan,
    *,
    group: int,
    device: torch.device,
    dtype: torch.dtype,
    table: Sequence[dispatch.Row] = dispatch.ARTICLE,
    batch_invariant: bool = False,
) -> Decoder:
    """Build a decoder, one block at a time, so that the peak is the result plus one dense layer.

    Args:
        source: where the weights are.
        plan: bits for each layer, and for embedding and head.
        group: values of K that share a scale, where the plan quantises.
        device, dtype: where the model runs and what it computes in.
        table: which kernel multiplies how many rows with a quantised layer on a GPU.
        batch_invariant: on a GPU, build it as `model.invariance` says, and `table` counts for nothing. On a CPU, nothing
            changes: chunks and batches of other sizes give logits that differ by rounding, about 1e-4 for SmolLM2-135M, and the
            decoder does not call itself batch-invariant.

    Raises:
        CheckpointError, QuantisationError: as the source and the quantiser do.
        SettingError: `batch_invariant` on a GPU, for what this model, dtype or card cannot do.
    """
    invariant = batch_invariant and device.type != "cpu"
    if invariant:
        invariance.require(source.config, device, dtype)
    settings = {"group": group, "device": device, "dtype": dtype, "table": table, "batch_invariant": invariant}
    blocks = [
        build_block(source, plan, index, **settings)
        for index in bar(range(source.config.num_layers), desc=f"loading {source.name}", unit="layer")
    ]
    return build_outside(source, plan, blocks, **settings)


def build_outside(
    source: WeightSource,
    plan: Plan,
    blocks: Sequence[Block] = (),
    *,
    group: int,
    device: torch.device,
    dtype: torch.dtype,
    table: Sequence[dispatch.Row] = dispatch.ARTICLE,
    batch_invariant: bool = False,
) -> Decoder:
    """A decoder of given blocks: embedding, final norm and output head come from the source. Arguments as `build_decoder`.

    Embedding and head that the plan gives bits are rounded here, since no source holds them packed. Tied ones share a weight.

    batch_invariant: on a GPU only, and for blocks that were built so.
    """
    table = invariance.TABLE if batch_invariant else table
    fixed_rows = invariance.FIXED_ROWS if batch_invariant else None
    tied = source.config.tied_embeddings
    if tied and plan.bits_for(EMBEDDING) != plan.bits_for(HEAD):
        raise QuantisationError(
            f"plan '{plan.name}': {EMBEDDING} and {HEAD} of '{source.name}' are one table and must have the same bits"
        )

    def read(name: str) -> torch.Tensor | PackedWeight:
        weight, bits = source.tensor(f"{name}.weight"), plan.bits_for(name)
        if bits is None:
            return weight.to(device, dtype)
        return concatenate([rtn.quantise(rows, bits, group) for rows in weight.split(ROWS_AT_ONCE)]).to(device)

    looked_up = read(EMBEDDING)
    multiplied = looked_up if tied else read(HEAD)
    embed = PackedEmbedding(looked_up, dtype) if isinstance(looked_up, PackedWeight) else DenseEmbedding(looked_up)
    if isinstance(multiplied, PackedWeight):
        lm_head = QuantLinear(multiplied, table=table)
    else:
        lm_head = DenseLinear(multiplied, fixed_rows=fixed_rows)
    norm = source.tensor("model.norm.weight").to(device, dtype)
    ops = CudaOps(invariance.FIXED_SPLIT) if batch_invariant else None
    return Decoder(source.config, embed, list(blocks), norm, lm_head, ops, batch_invariant)


def build_block(
    source: WeightSource,
    plan: Plan,
    index: int,
    *,
    group: int,
    device: torch.device,
    dtype: torch.dtype,
    table: Sequence[dispatch.Row] = dispatch.ARTICLE,
    batch_invariant: bool = False,
) -> Block:
    """One block; arguments and errors as `build_decoder`, but `batch_invariant` on a GPU only."""
    config, prefix = source.config, f"model.layers.{index}"
    table = invariance.TABLE if batch_invariant else table
    fixed_rows = invariance.FIXED_ROWS if batch_invariant else None

    def dense(name: str) -> torch.Tensor:
        return source.tensor(f"{prefix}.{name}").to(device, dtype)

    def linear(names: Sequence[str]) -> Linear:
        has_bias = config.qkv_bias and names is ATTENTION_IN
        bias = torch.cat([dense(f"{name}.bias") for name in names]) if has_bias else None
        layers = [f"{prefix}.{name}" for name in names]
        asked = {plan.bits_for(layer) for layer in layers}
        if len(asked) > 1:
            raise QuantisationError(
                f"plan '{plan.name}': {', '.join(layers)} are one product and must have the same bits"
            )
        (bits,) = asked
        if bits is None:
            return DenseLinear(torch.cat([dense(f"{name}.weight") for name in names]), bias, fixed_rows)
        packed = concatenate([packed_weight(source, layer, bits, group) for layer in layers]).to(device)
        if names is MLP_IN and fused_rows(packed, table, device):  # `Block.interleaved`
            packed = interleave(packed)
        return QuantLinear(packed, bias, table)

    return Block(
        input_norm=dense("input_layernorm.weight"),
        qkv=linear(ATTENTION_IN),
        q_norm=dense("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=dense("self_attn.k_norm.weight") if config.qk_norm else None,
        o=linear(ATTENTION_OUT),
        post_norm=dense("post_attention_layernorm.weight"),
        gate_up=linear(MLP_IN),
        down=linear(MLP_OUT),
    )
