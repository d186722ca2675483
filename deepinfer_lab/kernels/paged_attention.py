"""Launchers of attention over the paged cache, one new token a sequence (`cuda/paged_attention.cuh`).

A sequence is split over thread blocks, as in Flash-Decoding (Dao and others, 2023), so that a few long sequences fill the card.

Softmax and sums are in float32. Positions from a sequence's length on are never read. A sequence of length 0 gives zeros. The
launch depends on shapes and on `max_context` only: a captured CUDA graph stays right when tables and lengths change.

Args:
    k, v: float16 or int8 [slots, kv_heads, D], contiguous, D one of `HEAD_DIMS`; a position's slot is block * block_size +
        offset.
    block_table: int64 [S, B], contiguous. seq_lens: int64 [S], none beyond `max_context`.
    block_size: positions of a block, a multiple of 4.
    max_context: known to the host; at most B * block_size.
    k_scale, v_scale: float16 [slots, kv_heads] for int8: value = int8 * scale. None for float16.
    fixed_split: positions of a split, a multiple of 64. A sequence's result is then the same bits in any batch. None: as the
        batch and the card ask for.
    out: float16 [S, heads, D] to write into.

Returns:
    float16 [S, heads, D].

Raises:
    KernelError: naming the argument, its value and the limit.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_lab.kernels.counters import counters
from deepinfer_lab.kernels.loader import launch_op, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import HEAD_DIMS, OPS
from deepinfer_lab.kernels.ops_check import expect, require

NAME = "paged_decode"
BLOCK_POSITIONS = 64  # that a thread block's four warps take in one turn; splits are multiples of it
GROUP_HEADS = 8  # query heads that share one read of K and V
RESIDENT = {
    torch.float16: 3,
    torch.int8: 4,
}  # thread blocks that a multiprocessor holds: what the kernels are compiled for
# Positions that one thread block attends to in less time than several, on an otherwise idle card: each further round of its
# four warps takes some 0.7 us, a round trip to memory, and to add up what splits have found takes 2.5, four such trips.
ALONE = 256
FULL = 0.9  # share of the card's block slots that is worth no further splitting
STATS = 4  # float32 values that a split hands on besides its sum
SLOT_STEP = 4  # a lane's positions come in fours, which must lie in one block of the cache
MAX_GRID_Y = 65535


def supports(head_dim: int, block_size: int) -> bool:
    """Whether `paged_decode` is compiled for this head_dim and can take blocks of so many positions."""
    return head_dim in HEAD_DIMS and block_size % SLOT_STEP == 0


@functools.lru_cache(maxsize=4096)  # asked for by every layer of every step
def split_size(rows: int, max_context: int, slots: int) -> int:
    """Positions of each split: the fewest splits that keep at least 90% of the slots busy, or else those that come closest.

    Args:
        rows: thread blocks per split. max_context: of the longest sequence, in positions. slots: thread blocks that the card
            holds at once.

    Returns:
        A multiple of `BLOCK_POSITIONS`.
    """
    turns = -(-max_context // BLOCK_POSITIONS)
    if rows * turns <= slots:
        return BLOCK_POSITIONS
    best, best_busy = turns, 0.0
    for splits in range(1, turns + 1):
        size = -(-turns // splits)
        blocks = rows * -(-turns // size)
        busy = blocks / slots / math.ceil(blocks / slots)
        if busy > best_busy:
            best, best_busy = size, busy
        if busy >= FULL:
            break
    return best * BLOCK_POSITIONS


@functools.cache
def _slots(device: int, stored: torch.dtype) -> int:
    return multiprocessors(device) * RESIDENT[stored]


def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_context: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    fixed_split: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q K^T / sqrt(D)) V for one new token of each sequence, q: float16 [S, heads, D], contiguous."""
    require(q.dim() == 3, f"{NAME}: q has shape {tuple(q.shape)}, must be [S, heads, D]")
    expect(NAME, "q", q, torch.float16, q.shape, q.device)
    cache = _Cache(k, v, k_scale, v_scale, block_table, seq_lens, block_size)
    return _attend(q, q.shape[1], None, None, cache, max_context, fixed_split, out)


def rotate_write_decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_context: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    fixed_split: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`elementwise.rope_write` and `paged_decode` in one launch, with the same bits.

    Args:
        qkv: float16 [S, heads + 2 * kv_heads, D], contiguous: q, K and V of each sequence's last position, where they are
            written: no two sequences may share it.
        cos, sin: float16 [positions, D / 2], for all that `seq_lens` can name.
        block_table, seq_lens, k, v, k_scale, v_scale: in a captured graph, no kernel of the same graph may have written them,
            but for last positions: all else is read before earlier kernels are done.
    """
    require(
        qkv.dim() == 3 and k.dim() == 3,
        f"{NAME}: qkv and k have shapes {tuple(qkv.shape)}, {tuple(k.shape)}, must be 3-d",
    )
    expect(NAME, "qkv", qkv, torch.float16, qkv.shape, qkv.device)
    for label, tensor in (("cos", cos), ("sin", sin)):
        expect(NAME, label, tensor, torch.float16, (cos.shape[0], qkv.shape[2] // 2), qkv.device)
    heads = qkv.shape[1] - 2 * k.shape[1]
    require(heads > 0, f"{NAME}: {qkv.shape[1]} rows of qkv, must be more than twice {k.shape[1]} KV heads")
    cache = _Cache(k, v, k_scale, v_scale, block_table, seq_lens, block_size)
    return _attend(qkv, heads, cos, sin, cache, max_context, fixed_split, out)


@dataclass(frozen=True)
class _Cache:
    """Where the sequences' K and V are."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int

    def check(self, sequences: int, dim: int, device: torch.device) -> None:
        k, block_size = self.k, self.block_size
        require(k.dim() == 3, f"{NAME}: k has shape {tuple(k.shape)}, must be [slots, kv_heads, D]")
        slots, kv_heads, _ = k.shape
        require(k.dtype in RESIDENT, f"{NAME}: k has dtype {k.dtype}, must be torch.float16 or torch.int8")
        require(
            block_size > 0 and block_size % SLOT_STEP == 0,
            f"{NAME}: block_size = {block_size}, must be a multiple of {SLOT_STEP}",
        )
        require(slots < 2**31, f"{NAME}: {slots} slots, must be below {2**31}")
        for label, tensor in (("k", k), ("v", self.v)):
            expect(NAME, label, tensor, k.dtype, (slots, kv_heads, dim), device, aligned=True)
        for label, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            wanted = k.dtype == torch.int8
            require(
                (scale is not None) == wanted, f"{NAME}: {label} is {'missing' if wanted else 'given'} for {k.dtype}"
            )
            if scale is not None:
                expect(NAME, label, scale, torch.float16, (slots, kv_heads), device)
        expect(NAME, "block_table", self.block_table, torch.int64, (sequences, self.block_table.shape[-1]), device)
        expect(NAME, "seq_lens", self.seq_lens, torch.int64, (sequences,), device)


def _attend(
    rows: torch.Tensor,
    heads: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cache: _Cache,
    max_context: int,
    fixed_split: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """rows: q, or q, K and V that are yet to be rotated and written."""
    sequences, _, dim = rows.shape
    device, stored, block_size = rows.device, cache.k.dtype, cache.block_size
    require(dim in HEAD_DIMS, f"{NAME}: head_dim = {dim}, must be one of {', '.join(map(str, HEAD_DIMS))}")
    cache.check(sequences, dim, device)
    kv_heads, columns = cache.k.shape[1], cache.block_table.shape[-1]
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"{NAME}: {heads} query heads, must be a multiple of {kv_heads} KV heads",
    )
    limit = min(columns * block_size, (2**32 - 1) // block_size)  # beyond: the reciprocal of block_size is too coarse
    require(1 <= max_context <= limit, f"{NAME}: max_context = {max_context}, must be 1 to {limit}")
    require(
        fixed_split is None or (fixed_split > 0 and fixed_split % BLOCK_POSITIONS == 0),
        f"{NAME}: fixed_split = {fixed_split}, must be a positive multiple of {BLOCK_POSITIONS}",
    )
    ratio = heads // kv_heads
    blocks = sequences * kv_heads * -(-ratio // GROUP_HEADS)
    require(
        1 <= blocks <= MAX_GRID_Y,
        f"{NAME}: {sequences} sequences need {blocks} rows of blocks, must be 1 to {MAX_GRID_Y}",
    )
    out = torch.empty(sequences, heads, dim, dtype=torch.float16, device=device) if out is None else out
    expect(NAME, "out", out, torch.float16, (sequences, heads, dim), device, aligned=True)

    size = fixed_split or split_size(blocks, max_context, _slots(device.index, stored))
    splits = -(-max_context // size)
    alone = size if fixed_split else max(size, ALONE)
    partial = arrived = None
    if splits > 1:
        partial = torch.empty(sequences, heads, splits, dim + STATS, dtype=torch.float32, device=device)
        arrived = counters(device.index).take(blocks)
    op = OPS[f"paged_decode_{'i8' if stored == torch.int8 else 'f16'}_{dim}"]
    tensors = (
        rows, cos, sin, cache.k, cache.v, cache.k_scale, cache.v_scale, cache.block_table, cache.seq_lens, out,
        partial, arrived,
    )  # fmt: skip
    reciprocal = np.uint32(-(-(2**32) // block_size))
    scale_log2 = np.float32(dim**-0.5 * math.log2(math.e))  # exp(x) is exp2(x * log2(e))
    launch_op(
        op, (splits, blocks), tensors, rows.shape[1] * dim, ratio, kv_heads, block_size, reciprocal, columns, splits, size,
        alone, scale_log2,
    )  # fmt: skip
    return out
