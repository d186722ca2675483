"""One decode step of a few rows, all layers of a decoder, in one launch (`cuda/decode_chain.cuh`).

As many blocks as there are multiprocessors wait for one another after each phase, while the weights of what follows are already
on their way. Made for one sequence or two, whose step is otherwise some two hundred launches that wait for one another.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.loader import launch_op, max_shared, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import CHAIN_ROWS, OPS
from deepinfer_lab.kernels.ops_check import expect, require
from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, unit_bytes

NAME = "decode_chain"
# As decode_chain.cuh and what it includes have them.
WARPS, HEAD_DIM, MOST_RATIO, MOST_PARTS, MOST_SPLITS, SPLIT_FLOATS = 8, 128, 8, 3, 8, 132
LAYER_BYTES, SHARE_BYTES, SEQUENCES_BYTES, SQUARES_BYTES = 13 * 8, 4 * 16, 8 * 16, 8 * 8 * 4
ATTENTION_BYTES = 10 * 160 * 2 + 2 * 8 * 8 * 4 + 8 * 8 * HEAD_DIM * 4
PRODUCTS, PHASES, STAMPS = 4, 5, 4
FEWEST_SLOTS = 8  # of the ring: with fewer, memory would wait
GROUP, CAPABILITY = 128, (9, 0)


@dataclass(frozen=True)
class ChainShape:
    """Sizes of a decoder. attention_bits, mlp_bits: of its weights, of qkv and o, and of gate_up and down."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    attention_bits: int
    mlp_bits: int

    @property
    def q_size(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """N and K of qkv, o, gate_up, down."""
        qkv = self.q_size + 2 * self.kv_heads * HEAD_DIM
        return (
            (qkv, self.hidden), (self.hidden, self.q_size), (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )  # fmt: skip


@dataclass(frozen=True)
class ChainPlan:
    """One launch: its `Op`'s name, blocks, slots of the ring, bytes of shared memory.

    Attributes:
        parts: that a tile of qkv, o or down can have. most_tiles: that a block can have of a product.
    """

    op: str
    blocks: int
    depth: int
    shared: int
    parts: int
    most_tiles: int


def obstacle(shape: ChainShape, rows: int, blocks: int, shared: int) -> str | None:
    """Why there is no `plan` for such a step, and what it would take; None where there is one.

    Args:
        blocks: multiprocessors. shared: bytes of shared memory that a block may have.
    """
    if f"{NAME}_w{shape.attention_bits}_w{shape.mlp_bits}_{CHAIN_ROWS[0]}" not in OPS:
        return f"{shape.attention_bits} bits in attention and {shape.mlp_bits} in the MLP, must be 4, and 4 or 3"
    if rows not in CHAIN_ROWS:
        return f"{rows} rows, must be one of {', '.join(map(str, CHAIN_ROWS))}"
    if shape.heads % shape.kv_heads or shape.heads // shape.kv_heads > MOST_RATIO:
        return f"{shape.heads} query heads for {shape.kv_heads} KV heads, must be 1 to {MOST_RATIO} for each"
    for name in ("hidden", "intermediate"):
        if getattr(shape, name) % UNIT_K:
            return f"{name} = {getattr(shape, name)}, must be a multiple of {UNIT_K}"
    parts = max(_parts(n, k, blocks) for n, k in (shape.products[i] for i in (0, 1, 3)))
    if parts > MOST_PARTS:
        return f"{blocks} blocks share tiles in up to {parts} parts, must be at most {MOST_PARTS}"
    depth = _depth(shape, rows, blocks, shared)
    return (
        None if depth >= FEWEST_SLOTS else f"{shared} bytes of shared memory hold {depth} slots, must be {FEWEST_SLOTS}"
    )


@functools.lru_cache
def plan(shape: ChainShape, rows: int, blocks: int, shared: int) -> ChainPlan:
    """Arguments as `obstacle`.

    Raises:
        KernelError: there is none; `obstacle` says why.
    """
    why = obstacle(shape, rows, blocks, shared)
    if why is not None:
        raise KernelError(f"{NAME}: {why}")
    depth = _depth(shape, rows, blocks, shared)
    return ChainPlan(
        op=f"{NAME}_w{shape.attention_bits}_w{shape.mlp_bits}_{rows}",
        blocks=blocks,
        depth=depth,
        shared=_fixed(shape, rows, blocks) + depth * _slot(shape),
        parts=max(_parts(n, k, blocks) for n, k in (shape.products[i] for i in (0, 1, 3))),
        most_tiles=_most_tiles(shape, blocks),
    )


def _parts(n: int, k: int, blocks: int) -> int:
    """Into how many parts a tile can fall whose units are shared evenly, in order."""
    units = k // UNIT_K
    return max(1, -(-(units - 1) // max(1, n // UNIT_N * units // blocks)) + 1)


def _most_tiles(shape: ChainShape, blocks: int) -> int:
    counts = [
        -(-(n // UNIT_N) // blocks)
        if i == 2
        else (-(-(n // UNIT_N) * (k // UNIT_K) // blocks) - 2) // (k // UNIT_K) + 2
        for i, (n, k) in enumerate(shape.products)
    ]
    return max(counts)


def _slot(shape: ChainShape) -> int:
    """Bytes of a slot of the ring, and of its barriers."""
    return WARPS * (max(unit_bytes(bits) for bits in (shape.attention_bits, shape.mlp_bits)) + 2 * UNIT_N) + 16


def _fixed(shape: ChainShape, rows: int, blocks: int) -> int:
    """Bytes of shared memory of a block beside its ring: `Space` in decode_chain.cuh."""
    activations = rows * (max(shape.hidden, shape.q_size, shape.intermediate) + 32) * 2
    sums = _most_tiles(shape, blocks) * WARPS * rows * UNIT_N * 4
    hidden = (rows + 1) * shape.hidden * 2
    tables = shape.layers * LAYER_BYTES + SHARE_BYTES + SEQUENCES_BYTES + SQUARES_BYTES
    return max(activations, ATTENTION_BYTES) + hidden + sums + tables


def _depth(shape: ChainShape, rows: int, blocks: int, shared: int) -> int:
    return (shared - _fixed(shape, rows, blocks)) // _slot(shape)


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


class DecodeChain:
    """All layers of a decoder for steps of `rows` sequences with one new token each.

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
        rows: int,
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
        self.plan = plan(shape, rows, blocks or multiprocessors(device.index), max_shared(device.index))
        self.shape, self.rows = shape, rows
        self._check(layers, norm, block_size)
        self._held, self._norm, self._cos, self._sin = tuple(layers), norm, cos, sin
        self._eps, self._block_size = eps, block_size
        self._layers = torch.tensor([_addresses(layer) for layer in layers], dtype=torch.int64).to(device)
        outputs = sum(shape.products[i][0] for i in (0, 1, 3))

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.found = zeros(outputs * self.plan.parts * rows)  # places that no block has stay zero
        self.gated = zeros(rows, shape.intermediate, dtype=torch.float16)
        self.attended = zeros(rows, shape.heads, MOST_SPLITS, SPLIT_FLOATS)
        self._arrived = zeros(2, dtype=torch.int32)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will use them, too

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
            x: float16 [rows, hidden]: embeddings. block_table: int64 [rows, B], contiguous. seq_lens: int64 [rows], the new
                tokens included, each of them at least 1.
            phases: stop after so many, five a layer: norm and qkv, attention, o, norm and gate_up, down. None: after all.
            stamps: int64 [blocks, 5, 4]: of the layer `stamped`, each block's clock after it has waited, after it has made its
                rows, after the products and after it has said so.

        Returns:
            hidden states and their final norm, float16 [rows, hidden] each.
        """
        shape, chosen = self.shape, self.plan
        expect(NAME, "x", x, torch.float16, (self.rows, shape.hidden), self._norm.device)
        expect(NAME, "block_table", block_table, torch.int64, (self.rows, block_table.shape[-1]), x.device)
        expect(NAME, "seq_lens", seq_lens, torch.int64, (self.rows,), x.device)
        hidden, normed = torch.empty_like(x), torch.empty_like(x)
        tensors = (
            x, self._layers, self._norm, hidden, normed, self._cos, self._sin, block_table, seq_lens, self.found, self.gated,
            self.attended, self._arrived, stamps,
        )  # fmt: skip
        numbers = (
            shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, self._block_size,
            np.uint32(-(-(2**32) // self._block_size)), block_table.shape[-1], chosen.depth, chosen.parts, chosen.most_tiles,
            PHASES * shape.layers if phases is None else phases, stamped, np.float32(self._eps),
            np.float32(HEAD_DIM**-0.5 * math.log2(math.e)),
        )  # fmt: skip
        launch_op(OPS[chosen.op], (chosen.blocks,), tensors, *numbers, shared=chosen.shared)
        return hidden, normed

    def parts_of(self, product: int) -> torch.Tensor:
        """What blocks have left of qkv (0), o (1) or down (3), added: float32 [rows, N]."""
        sizes = [self.shape.products[i][0] * self.plan.parts * self.rows for i in (0, 1, 3)]
        found = self.found.split(sizes)[(0, 1, 3).index(product)].view(-1, self.plan.parts, self.rows, UNIT_N)
        return found.sum(1).transpose(0, 1).flatten(1)


def _addresses(layer: LayerTensors) -> list[int]:
    """`ChainLayer` in chain_weights.cuh."""
    tiles, scales = zip(*layer.products, strict=True)
    tensors = (*tiles, *scales, layer.qkv_bias, layer.input_norm, layer.post_norm, layer.k, layer.v)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
