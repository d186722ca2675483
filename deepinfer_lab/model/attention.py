"""Attention over the paged cache, through torch on gathered blocks.

A step is taken apart into runs: a prompt chunk, or neighbouring sequences with one new token each. A captured CUDA graph is
replayed for other lengths than it was captured with: on the host, a step's lengths are upper bounds, and only its tensors say
what is attended to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch.backends.cuda import is_flash_attention_available
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_lab.kernels.loader import multiprocessors
from deepinfer_lab.kernels.merge_attention import merge_attention
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.step_input import StepInput

FLASH_TILE = 128  # queries of a thread block of flash attention
MOST_SPLITS, LEAST_PART = 8, 512
FLASH_HEAD_DIM = 256  # the largest that torch's flash attention takes
FLASH_CAPABILITY = (8, 0)  # and the least of a device


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of a step: one with many new tokens, or some with one each."""

    step: StepInput
    tokens: slice
    sequences: slice

    @property
    def is_chunk(self) -> bool:
        return self.step.query_lens[self.sequences.start] > 1

    @property
    def columns(self) -> int:
        """KV blocks that hold all that is attended to."""
        return self.step.block_table.shape[1]


def runs(step: StepInput) -> list[Run]:
    """In the order of the step."""
    found, token, sequence = [], 0, 0
    for length, group in groupby(step.query_lens):
        for count in [len(list(group))] if length == 1 else [1 for _ in group]:
            tokens = slice(token, token + count * length)
            found.append(Run(step, tokens, slice(sequence, sequence + count)))
            token, sequence = tokens.stop, sequence + count
    return found


class Attend(Protocol):
    """Attention of a run's tokens in one layer: q [T, heads, D] -> [T, heads * D]."""

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor: ...


class Attention:
    """Causal grouped-query attention of one step's new tokens over their sequences' cached keys and values.

    Args:
        chunk, rows: what to make of a run of either kind, once for all layers: `parts`, beside the tokens of each.
    """

    def __init__(
        self, step: StepInput, kv: KVPool, chunk: Callable[[Run, KVPool], Attend], rows: Callable[[Run, KVPool], Attend]
    ) -> None:
        self.parts = [(run.tokens, (chunk if run.is_chunk else rows)(run, kv)) for run in runs(step)]

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [T, heads, D] -> [T, heads * D]. The step's own K and V must already be in the pool."""
        parts = [attend(layer, q[tokens]) for tokens, attend in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def torch_attention(step: StepInput, kv: KVPool) -> Attention:
    """On any device and in any dtype."""
    return Attention(step, kv, MaskedChunk, MaskedRows)


class MaskedRows:
    """One new token a sequence. Heads that share a KV head are folded into the query dimension, so K is never repeated."""

    def __init__(self, run: Run, kv: KVPool) -> None:
        self._kv, self._table = kv, run.step.block_table[run.sequences]
        keys = torch.arange(run.columns * kv.block_size, device=self._table.device)
        self._mask = (keys < run.step.seq_lens[run.sequences].unsqueeze(1)).view(len(self._table), 1, 1, -1)

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        k, v = self._kv.gather(layer, self._table)
        folded = q.view(len(q), k.shape[2], -1, q.shape[-1])
        out = scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=self._mask)
        return out.reshape(len(q), -1)


class MaskedChunk:
    """Many new tokens of one sequence, with a mask [C, L]."""

    def __init__(self, run: Run, kv: KVPool) -> None:
        step, sequence = run.step, run.sequences.start
        self._kv, self._context = kv, step.context_lens[sequence]
        self._table = step.block_table[run.sequences, : -(-self._context // kv.block_size)]
        keys = torch.arange(self._context, device=self._table.device)
        self._mask = keys <= step.positions[run.tokens].unsqueeze(1)

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        k, v = (x[0, : self._context].transpose(0, 1).unsqueeze(0) for x in self._kv.gather(layer, self._table))
        out = scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=self._mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1).reshape(len(q), -1)


class PastKeys:
    """The keys before a chunk, cut into parts, each attended to by a copy of the queries as a sequence of its own.

    Args:
        length: int64 [1], how many they are. queries: how many tokens the chunk has.
    """

    def __init__(self, length: torch.Tensor, queries: int, parts: int) -> None:
        steps = torch.arange(parts + 1, device=length.device)
        self._queries, self._parts = queries, parts
        self._copies_ends, self._key_ends = (steps * queries).int(), (length * steps // parts).int()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Results and log-sum-exps of all parts, as `merge_attention` takes them. k, v: [keys or more, kv_heads, D]."""
        copies = q if self._parts == 1 else q.repeat(self._parts, 1, 1)
        return _flash(copies, k, v, self._copies_ends, self._key_ends, self._queries, is_causal=False)


class FlashChunk:
    """Many new tokens of one sequence, through torch's flash attention, which skips what a mask would hide.

    It makes a thread block for each head and `FLASH_TILE` tokens, and a short chunk would leave most of the card idle however
    long its context is. The keys before the chunk are then cut into parts, each attended to as a sequence of its own, and the
    results are merged.

    All lengths are read from the device, as a captured graph needs it. Of queries and keys that differ in number, flash
    attention aligns the ends. The operator is the one beneath `torch.nn.attention.varlen`, whose own arguments changed from
    torch 2.10 to 2.12.
    """

    def __init__(self, run: Run, kv: KVPool) -> None:
        step, sequence = run.step, run.sequences.start
        positions = torch.arange(step.context_lens[sequence], device=step.positions.device)
        self._kv, self._rows = kv, kv.rows(step.block_table[sequence], positions)
        self._queries = run.tokens.stop - run.tokens.start
        ends = step.query_start[sequence : sequence + 2]
        self._query_ends = (ends - ends[0]).int()
        self._length = step.seq_lens[run.sequences]
        self._parts: dict[int, tuple[PastKeys | None, torch.Tensor]] = {}  # by their number; the first layer makes them

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        k, v = self._kv.read(layer, self._rows)
        splits = flash_splits(self._queries, q.shape[1], len(k), q.device)
        if splits not in self._parts:
            self._parts[splits] = self._cut(splits)
        past, own_ends = self._parts[splits]
        own = _flash(q, k, v, self._query_ends, own_ends, self._queries, is_causal=True)
        return own[0].flatten(1) if past is None else merge_attention(*past(q, k, v), *own).flatten(1)

    def _cut(self, splits: int) -> tuple[PastKeys | None, torch.Tensor]:
        """Parts of the keys before the chunk, and where the keys that are left begin and end."""
        past = self._length - self._queries if splits else torch.zeros_like(self._length)
        parts = PastKeys(past, self._queries, splits) if splits else None
        return parts, torch.cat((past, self._length)).int()


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ends: torch.Tensor,
    k_ends: torch.Tensor,
    queries: int,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [T, H, D], and log-sum-exps [H, T]. q_ends, k_ends: int32, where sequences begin and end."""
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_ends, k_ends, queries, len(k), 0.0, is_causal, False
    )  # dropout, and no debugging mask
    return out, sums


def flash_splits(queries: int, heads: int, keys: int, device: torch.device) -> int:
    """Parts of the keys before a chunk: as many as fill the card twice, of at least `LEAST_PART` keys each. 0: none apart."""
    blocks = heads * -(-queries // FLASH_TILE)
    splits = min(-(-2 * multiprocessors(device.index) // blocks), keys // LEAST_PART, MOST_SPLITS)
    return splits if splits > 1 else 0


def flash_takes(kv: KVPool, device: torch.device) -> bool:
    """Whether torch's flash attention takes these heads here."""
    return (
        device.type == "cuda"
        and kv.shape.dtype in (torch.float16, torch.bfloat16)
        and kv.shape.head_dim <= FLASH_HEAD_DIM
        and kv.shape.head_dim % 8 == 0
        and is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
    )
