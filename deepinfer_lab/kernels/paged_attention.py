"""Launcher of attention over the paged cache, one new token a sequence (`cuda/paged_attention.cuh`, `cuda/paged_combine.cu`).

A sequence is split over thread blocks, as in Flash-Decoding (Dao and others, 2023), so that a few long sequences fill the card.
"""

import functools
import math

import numpy as np
import torch

from deepinfer_lab.kernels.loader import launch_op, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import HEAD_DIMS, OPS
from deepinfer_lab.kernels.ops_check import expect, require

BLOCK_POSITIONS = 64  # that a thread block's four warps take in one turn; splits are multiples of it
GROUP_HEADS = 8  # query heads that share one read of K and V
RESIDENT = {
    torch.float16: 3,
    torch.int8: 4,
}  # thread blocks that a multiprocessor holds: what the kernels are compiled for
FULL = 0.9  # share of the card's block slots that is worth no further splitting
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
    """softmax(q K^T / sqrt(D)) V for one new token of each sequence, enqueued on torch's current stream.

    Softmax and sums are in float32. Positions from a sequence's length on are never read. A sequence of length 0 gives zeros.
    The launch depends on shapes and on `max_context` only: a captured CUDA graph stays right when tables and lengths change.

    Args:
        q: float16 [S, heads, D], D one of `HEAD_DIMS`, contiguous.
        k, v: float16 or int8 [slots, kv_heads, D], contiguous; a position's slot is block * block_size + offset.
        block_table: int64 [S, B], contiguous. seq_lens: int64 [S], none beyond `max_context`.
        block_size: positions of a block, a multiple of 4.
        max_context: known to the host; at most B * block_size.
        k_scale, v_scale: float16 [slots, kv_heads] for int8: value = int8 * scale. None for float16.
        fixed_split: positions of a split, a multiple of 64. A sequence's result is then the same bits in any batch. None: as
            the batch and the card ask for.
        out: float16 [S, heads, D] to write into.

    Returns:
        float16 [S, heads, D].

    Raises:
        KernelError: naming the argument, its value and the limit.
    """
    name = "paged_decode"
    require(
        q.dim() == 3 and k.dim() == 3, f"{name}: q and k have shapes {tuple(q.shape)}, {tuple(k.shape)}, must be 3-d"
    )
    (sequences, heads, dim), (slots, kv_heads, _) = q.shape, k.shape
    require(dim in HEAD_DIMS, f"{name}: head_dim = {dim}, must be one of {', '.join(map(str, HEAD_DIMS))}")
    require(k.dtype in RESIDENT, f"{name}: k has dtype {k.dtype}, must be torch.float16 or torch.int8")
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"{name}: {heads} query heads, must be a multiple of {kv_heads} KV heads",
    )
    require(
        block_size > 0 and block_size % SLOT_STEP == 0, f"{name}: block_size = {block_size}, must be a multiple of 4"
    )
    columns = block_table.shape[-1]
    limit = min(columns * block_size, (2**32 - 1) // block_size)  # beyond: the reciprocal of block_size is too coarse
    require(1 <= max_context <= limit, f"{name}: max_context = {max_context}, must be 1 to {limit}")
    require(
        fixed_split is None or (fixed_split > 0 and fixed_split % BLOCK_POSITIONS == 0),
        f"{name}: fixed_split = {fixed_split}, must be a positive multiple of {BLOCK_POSITIONS}",
    )
    require(slots < 2**31, f"{name}: {slots} slots, must be below {2**31}")
    ratio = heads // kv_heads
    rows = sequences * kv_heads * -(-ratio // GROUP_HEADS)
    require(
        1 <= rows <= MAX_GRID_Y, f"{name}: {sequences} sequences need {rows} rows of blocks, must be 1 to {MAX_GRID_Y}"
    )
    device = q.device
    expect(name, "q", q, torch.float16, (sequences, heads, dim), device, aligned=True)
    for label, tensor in (("k", k), ("v", v)):
        expect(name, label, tensor, k.dtype, (slots, kv_heads, dim), device, aligned=True)
    for label, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        wanted = k.dtype == torch.int8
        require((scale is not None) == wanted, f"{name}: {label} is {'missing' if wanted else 'given'} for {k.dtype}")
        if scale is not None:
            expect(name, label, scale, torch.float16, (slots, kv_heads), device)
    expect(name, "block_table", block_table, torch.int64, (sequences, columns), device)
    expect(name, "seq_lens", seq_lens, torch.int64, (sequences,), device)
    if out is None:
        out = torch.empty_like(q)
    expect(name, "out", out, torch.float16, (sequences, heads, dim), device)

    size = fixed_split or split_size(rows, max_context, _slots(device.index, k.dtype))
    splits = -(-max_context // size)
    partial = stats = None
    if splits > 1:
        partial = torch.empty(sequences, heads, splits, dim, dtype=torch.float32, device=device)
        stats = torch.empty(sequences, heads, splits, 2, dtype=torch.float32, device=device)
    op = OPS[f"paged_decode_{'i8' if k.dtype == torch.int8 else 'f16'}_{dim}"]
    tensors = (q, k, v, k_scale, v_scale, block_table, seq_lens, out, partial, stats)
    reciprocal = np.uint32(-(-(2**32) // block_size))
    scale_log2 = np.float32(dim**-0.5 * math.log2(math.e))  # exp(x) is exp2(x * log2(e))
    launch_op(
        op, (splits, rows), tensors, heads, kv_heads, block_size, reciprocal, columns, splits, size, scale_log2
    )  # fmt: skip
    if splits > 1:
        launch_op(OPS["paged_combine"], (heads, sequences), (partial, stats, seq_lens, out), heads, dim, splits, size)
    return out
