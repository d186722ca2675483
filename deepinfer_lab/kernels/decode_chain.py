"""One decode step of one sequence, all layers of a decoder, in one launch (`cuda/decode_chain.cuh`).

As many blocks as there are multiprocessors wait for one another after each phase, while the weights of what follows are already
on their way. Its step is otherwise some two hundred launches that wait for one another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_lab.kernels import dependent_launch
from deepinfer_lab.kernels.chain_plan import (
    CAPABILITY,
    DOWN,
    HEAD_DIM,
    MOST_PARTS,
    MOST_SPLITS,
    NAME,
    OUT,
    PHASES,
    QKV,
    STATS,
    ChainShape,
    obstacle,
    plan,
)
from deepinfer_lab.kernels.loader import launch_op, max_shared, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require
from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, unit_bytes


@dataclass(frozen=True)
class LayerTensors:
    """What a layer reads and writes. Tiles and scales as `quant.tiles.TiledWeight` has them, gate_up of `quant.interleave`.

    Attributes:
        products: tiles and scales of qkv, o, gate_up, down. qkv_bias: float16 [N of qkv], or None.
        input_norm, post_norm: float16 [hidden]. k, v: float16 [slots, kv_heads, 128].
    """

    products: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    qkv_bias: torch.Tensor | None
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def device_obstacle(device: torch.device, shape: ChainShape) -> str | None:
    """Why this device cannot run such a chain, and what it would take; None where it can."""
    if device.type != "cuda":
        return f"device '{device}', must be a CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        found, only = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
        return f"compute capability {found}, must be {only}"
    if not dependent_launch.available(capability):
        return "the driver has no cuLaunchKernelEx, must be one for CUDA 11.8 or later"
    return obstacle(shape, multiprocessors(device.index), max_shared(device.index))


class DecodeChain:
    """All layers of a decoder, for one new token of one sequence.

    Args:
        layers: in order. norm: the final one, float16 [hidden]. cos, sin: float16 [positions, 64].
        block_size: positions of a block of the cache, a multiple of 4.
        blocks: multiprocessors that it may have; None: all.

    Raises:
        KernelError: there is no `plan`, or a tensor is not what it should be.
    """

    def __init__(
        self,
        shape: ChainShape,
        layers: Sequence[LayerTensors],
        norm: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        eps: float,
        block_size: int,
        blocks: int | None = None,
    ) -> None:
        device = norm.device
        self.plan = plan(shape, blocks or multiprocessors(device.index), max_shared(device.index))
        self.shape = shape
        self._check(layers, norm, block_size)
        self._held, self._norm, self._cos, self._sin = tuple(layers), norm, cos, sin
        self._eps, self._block_size = eps, block_size
        self._layers = torch.tensor([_addresses(layer) for layer in layers], dtype=torch.int64).to(device)

        def places(*size: int) -> torch.Tensor:
            return torch.full(size, -1, dtype=torch.int32, device=device)  # empty, as chain_exchange.cuh has it

        self.found = places(sum(self._found_sizes()))
        self.gated = places(shape.intermediate // 2)
        self.attended = places(shape.heads * (MOST_SPLITS * (HEAD_DIM // 2 + STATS) + HEAD_DIM // 2))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will use them, too

    def _found_sizes(self) -> list[int]:
        """Words of the parts of qkv, o and down."""
        sizes = []
        for grain, product in zip(self.plan.grains, (QKV, OUT, DOWN), strict=True):
            n, k = self.shape.products[product]
            sizes.append(n * (MOST_PARTS if grain * UNIT_K < k else 1))
        return sizes

    def reset(self) -> None:
        """Empty all places: after a launch that stopped early, before the next."""
        for places in (self.found, self.gated, self.attended):
            places.fill_(-1)

    def _check(self, layers: Sequence[LayerTensors], norm: torch.Tensor, block_size: int) -> None:
        shape, device = self.shape, norm.device
        require(len(layers) == shape.layers, f"{NAME}: {len(layers)} layers, must be {shape.layers}")
        require(block_size > 0 and block_size % 4 == 0, f"{NAME}: block_size = {block_size}, must be a multiple of 4")
        bits = (shape.attention_bits,) * 2 + (shape.mlp_bits,) * 2
        for layer in layers:
            for (n, k), its_bits, (tiles, scales) in zip(shape.products, bits, layer.products, strict=True):
                count, units = n // UNIT_N, k // UNIT_K
                expect(NAME, "tiles", tiles, torch.uint8, (count, units, unit_bytes(its_bits)), device, aligned=True)
                expect(NAME, "scales", scales, torch.float16, (count, units, 8, 2), device, aligned=True)
            for name in ("input_norm", "post_norm"):
                expect(NAME, name, getattr(layer, name), torch.float16, (shape.hidden,), device, aligned=True)
            if layer.qkv_bias is not None:
                expect(NAME, "qkv_bias", layer.qkv_bias, torch.float16, (shape.products[0][0],), device, aligned=True)
            for name in ("k", "v"):
                slots = getattr(layer, name).shape[0]
                size = slots, shape.kv_heads, HEAD_DIM
                expect(NAME, name, getattr(layer, name), torch.float16, size, device, aligned=True)

    def __call__(
        self,
        x: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        phases: int | None = None,
        stamps: torch.Tensor | None = None,
        stamped: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue on torch's current stream. One launch of a chain must be done before its next begins.

        Args:
            x: float16 [1, hidden]: the embedding. block_table: int64 [1, B]. seq_lens: int64 [1], the new token included, 1 to
                the plan's `longest`; no one looks, since that would be to wait.
            phases: stop after so many, five a layer: norm and qkv, attention, o, norm and gate_up, down. None: after all. A
                launch that ends within a layer returns nothing of use, and `reset` comes before the next.
            stamps: int64 [blocks, 5, 4]: of the layer `stamped`, each block's clock after its first thread has waited, after
                all activations are there, after the products and after it has left the results.

        Returns:
            the hidden state and its final norm, float16 [1, hidden] each.
        """
        shape, chosen = self.shape, self.plan
        expect(NAME, "x", x, torch.float16, (1, shape.hidden), self._norm.device)
        expect(NAME, "block_table", block_table, torch.int64, (1, block_table.shape[-1]), x.device)
        expect(NAME, "seq_lens", seq_lens, torch.int64, (1,), x.device)
        hidden, normed = torch.empty_like(x), torch.empty_like(x)
        tensors = (
            x, self._layers, self._norm, hidden, normed, self._cos, self._sin, block_table, seq_lens, self.found, self.gated,
            self.attended, stamps,
        )  # fmt: skip
        numbers = (
            shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, self._block_size,
            np.uint32(-(-(2**32) // self._block_size)), chosen.depth, *chosen.grains, chosen.most_tiles,
            PHASES * shape.layers if phases is None else phases, stamped, np.float32(self._eps),
            np.float32(HEAD_DIM**-0.5 * math.log2(math.e)),
        )  # fmt: skip
        launch_op(OPS[chosen.op], (chosen.blocks,), tensors, *numbers, shared=chosen.shared)
        return hidden, normed


def _addresses(layer: LayerTensors) -> list[int]:
    """`ChainLayer` in chain_space.cuh."""
    tiles, scales = zip(*layer.products, strict=True)
    tensors = (*tiles, *scales, layer.qkv_bias, layer.input_norm, layer.post_norm, layer.k, layer.v)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
