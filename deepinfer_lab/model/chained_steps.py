"""Decode steps of one sequence whose layers are one launch (`kernels.decode_chain`): for which decoders, and over which cache.

Launches of a few microseconds, each of which waits for the one before it, are most of such a step. Nothing else of it changes:
the embedding comes before, the head after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deepinfer_lab.kernels.chain_plan import GROUP, HEAD_DIM, ChainShape
from deepinfer_lab.kernels.decode_chain import DecodeChain, LayerTensors, device_obstacle
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.config import ModelConfig
from deepinfer_lab.model.rope import Rope

if TYPE_CHECKING:
    from deepinfer_lab.model.decoder import Block, Linear

LINEARS = ("qkv", "o", "gate_up", "down")


def chain_of(
    config: ModelConfig, blocks: Sequence[Block], norm: torch.Tensor, rope: Rope, kv: KVPool
) -> DecodeChain | None:
    """A decoder's chain; None where it, the cache or the device has something against one. It holds the pool's memory, and the
    blocks'.

    Args:
        norm: the final one [hidden].
    """
    if obstacle(config, blocks, kv) is not None or device_obstacle(norm.device, _shape(config, blocks[0])) is not None:
        return None
    layers = [_layer(block, kv, index) for index, block in enumerate(blocks)]
    more = {"eps": config.rms_norm_eps, "block_size": kv.block_size}
    return DecodeChain(_shape(config, blocks[0]), layers, norm, rope.cos, rope.sin, **more)


def obstacle(config: ModelConfig, blocks: Sequence[Block], kv: KVPool) -> str | None:
    """Why such a decoder has no chain over such a cache on any device, and what it would take; None where that is the device's
    to say."""
    if kv.shape.stored_dtype != torch.float16:
        return f"K and V of {kv.shape.stored_dtype}, must be {torch.float16}"
    if kv.block_size % 4:
        return f"block_size = {kv.block_size}, must be a multiple of 4"
    if config.head_dim != HEAD_DIM:
        return f"head_dim = {config.head_dim}, must be {HEAD_DIM}"
    if config.qk_norm:
        return "norms of q and k, must be none"
    if not blocks:
        return "no blocks, must be one or more"
    for block in blocks:
        for name, first in zip(LINEARS, _linears(blocks[0]), strict=True):
            linear = getattr(block, name)
            if linear.tiled is None:
                return f"{name} as it is stored, must be in tiles"
            if linear.tiled.group != GROUP:
                return f"{name} in groups of {linear.tiled.group}, must be {GROUP}"
            if linear.tiled.bits != first.tiled.bits:
                return f"{name} of {linear.tiled.bits} bits after {first.tiled.bits}, must be the same in all layers"
            if linear.bias is not None and name != "qkv":
                return f"a bias of {name}, must be none"
        if not block.interleaved:
            return "gate beside up, must be interleaved"
    bits = [linear.tiled.bits for linear in _linears(blocks[0])]
    if bits[0] != bits[1] or bits[2] != bits[3]:
        return f"{', '.join(map(str, bits))} bits, must be the same in {LINEARS[0]} and {LINEARS[1]}, and in the others"
    return None


def _linears(block: Block) -> list[Linear]:
    return [getattr(block, name) for name in LINEARS]


def _shape(config: ModelConfig, block: Block) -> ChainShape:
    return ChainShape(
        config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
        attention_bits=block.qkv.tiled.bits, mlp_bits=block.down.tiled.bits,
    )  # fmt: skip


def _layer(block: Block, kv: KVPool, index: int) -> LayerTensors:
    memory = kv.layer(index)
    products = tuple((linear.tiled.tiles, linear.tiled.scales) for linear in _linears(block))
    return LayerTensors(products, block.qkv.bias, block.input_norm, block.post_norm, memory.k, memory.v)
