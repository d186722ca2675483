"""How the blocks of a decode step in one launch (`decode_chain`) share its products, and what shared memory they take.

A product is dealt in whole pieces of so many units of K of a tile (16 outputs), as evenly as pieces allow. The larger they are,
the fewer parts of a tile have to be read by all blocks.
"""

import functools
from dataclasses import dataclass

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.ops_catalogue import CHAIN_BITS
from deepinfer_lab.kernels.tiles_check import UNIT_K, UNIT_N, unit_bytes

NAME = "decode_chain"
# As chain_space.cuh has them.
WARPS, HEAD_DIM, MOST_RATIO, MOST_PARTS, MOST_SPLITS, STATS = 16, 128, 8, 2, 8, 4
CHAIN_BYTES, SHARE_BYTES, LAYER_BYTES = 13 * 8 + 16 * 4, 4 * 40, 13 * 8
POSITION_BYTES = 2 * WARPS * 8 * 4 + HEAD_DIM * 2
ATTENTION_BYTES = 10 * 160 * 2 + 8 * 32 * 16 + 16 * 8 * 8 * 2 + 2 * 16 * 8 * 4
PRODUCTS, PHASES = 4, 5
QKV, OUT, GATE_UP, DOWN = range(PRODUCTS)
UNDER_WAY = 3  # slots of the ring: with fewer, memory would wait
CACHED_BYTES = 2 * WARPS * 8 * HEAD_DIM * 2  # K and V of a round, in the place of the ring's last slots
MOST_POSITIONS = 2 * WARPS * 8  # of a split: two rounds
EVEN = 1.06  # what the block with most may have of a product, relative to an even share
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
        grains: units of K in a piece of qkv, o and down. most_tiles: that a block can have of a product.
        longest: positions that a sequence can have.
    """

    op: str
    blocks: int
    depth: int
    shared: int
    grains: tuple[int, int, int]
    most_tiles: int
    longest: int


def obstacle(shape: ChainShape, blocks: int, shared: int) -> str | None:
    """Why there is no `plan` for such a step, and what it would take; None where there is one.

    Args:
        blocks: multiprocessors. shared: bytes of shared memory that a block may have.
    """
    if (shape.attention_bits, shape.mlp_bits) not in CHAIN_BITS:
        allowed = ", ".join(f"{attention} and {mlp}" for attention, mlp in CHAIN_BITS)
        return f"{shape.attention_bits} bits in attention and {shape.mlp_bits} in the MLP, must be one of {allowed}"
    if shape.heads % shape.kv_heads or shape.heads // shape.kv_heads > MOST_RATIO:
        return f"{shape.heads} query heads for {shape.kv_heads} KV heads, must be 1 to {MOST_RATIO} for each"
    for name in ("hidden", "intermediate"):
        if getattr(shape, name) % UNIT_K:
            return f"{name} = {getattr(shape, name)}, must be a multiple of {UNIT_K}"
    used = _blocks(shape, blocks)
    if not _splits(shape, used):
        return f"{used} blocks for {shape.kv_heads} KV heads, must be at least as many"
    depth = _depth(shape, used, shared)
    fewest = -(-CACHED_BYTES // _slot(shape)) + UNDER_WAY
    if depth >= fewest:
        return None
    return f"{shared} bytes of shared memory hold {depth} slots, must be at least {fewest}"


@functools.lru_cache
def plan(shape: ChainShape, blocks: int, shared: int) -> ChainPlan:
    """Arguments as `obstacle`.

    Raises:
        KernelError: there is none; `obstacle` says why.
    """
    why = obstacle(shape, blocks, shared)
    if why is not None:
        raise KernelError(f"{NAME}: {why}")
    used = _blocks(shape, blocks)
    depth = _depth(shape, used, shared)
    return ChainPlan(
        op=f"{NAME}_w{shape.attention_bits}_w{shape.mlp_bits}",
        blocks=used,
        depth=depth,
        shared=_fixed(shape, used) + depth * _slot(shape),
        grains=tuple(_grain(n, k, used) for n, k in (shape.products[i] for i in (QKV, OUT, DOWN))),
        most_tiles=_most_tiles(shape, used),
        longest=_splits(shape, used) * MOST_POSITIONS,
    )


def _blocks(shape: ChainShape, blocks: int) -> int:
    """At most one block to a tile: each has something of every product, and no tile falls into more than two parts."""
    return min(blocks, *(n // UNIT_N for n, _ in shape.products))


def _splits(shape: ChainShape, blocks: int) -> int:
    """Of a sequence's positions: a block has at most one."""
    return min(blocks // shape.kv_heads, MOST_SPLITS)


def _grain(n: int, k: int, blocks: int) -> int:
    """Units of K in a piece: as many as leave the shares even, since each part of a tile has to be read by all."""
    units, tiles = k // UNIT_K, n // UNIT_N
    fits = [
        g
        for g in range(1, units + 1)
        if units % g == 0 and _most(units // g * tiles, blocks) * g <= EVEN * tiles * units / blocks
    ]
    return max(fits, default=1)


def _most(pieces: int, blocks: int) -> int:
    return -(-pieces // blocks)


def _most_tiles(shape: ChainShape, blocks: int) -> int:
    """Of a product that is dealt in pieces, its first and last may be parts."""
    counts = []
    for i, (n, k) in enumerate(shape.products):
        each = 1 if i == GATE_UP else k // UNIT_K // _grain(n, k, blocks)
        most = _most(n // UNIT_N * each, blocks)
        counts.append(most if each == 1 else (most - 2) // each + 2)
    return max(counts)


def _slot(shape: ChainShape) -> int:
    """Bytes of a slot of the ring, and of its barriers."""
    return WARPS * (max(unit_bytes(bits) for bits in (shape.attention_bits, shape.mlp_bits)) + 2 * UNIT_N) + 16


def _fixed(shape: ChainShape, blocks: int) -> int:
    """Bytes of shared memory of a block in front of its ring: `Space` in chain_space.cuh, and what that speaks of."""
    most = max(shape.hidden, shape.q_size, shape.intermediate)
    space = _up(CHAIN_BYTES + SHARE_BYTES + WARPS * 8 + 5 * 4 + 13 * 4) + WARPS * 4
    digits = max(2 * (most + 16), ATTENTION_BYTES)
    hidden = 2 * shape.hidden * 2  # of x and of a norm's weight
    sums = _most_tiles(shape, blocks) * WARPS * UNIT_N * 4
    totals = most // UNIT_K * 8
    return _up(space + digits + hidden + sums + shape.layers * LAYER_BYTES + totals) + POSITION_BYTES


def _up(count: int) -> int:
    return -(-count // 16) * 16


def _depth(shape: ChainShape, blocks: int, shared: int) -> int:
    return (shared - _fixed(shape, blocks)) // _slot(shape)
