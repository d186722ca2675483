"""The memory of the paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.int8 import dequantise, quantise


@dataclass(frozen=True)
class KVShape:
    """What one token costs: K and V in every layer.

    dtype: what the model computes in, and gets from the cache.
    quantised: store INT8 values and float16 scales (`int8.py`) in place of `dtype`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    quantised: bool = False

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.int8 if self.quantised else self.dtype

    @property
    def bytes_per_token(self) -> int:
        scale = torch.float16.itemsize if self.quantised else 0
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.stored_dtype.itemsize + scale)


@dataclass(frozen=True)
class KVLayer:
    """One layer's memory as it lies, for kernels: views into the pool, contiguous, one row per slot.

    k, v: [num_blocks * block_size, kv_heads, head_dim], the compute dtype or int8.
    k_scale, v_scale: float16 [num_blocks * block_size, kv_heads], or None where the values are not quantised.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class KVPool:
    """K and V of all layers, [layers, 2, num_blocks * block_size, kv_heads, head_dim].

    A token's *slot* is block * block_size + offset. A model forward writes new tokens with `write`, reads whole sequences,
    block by block, with `gather`, and any tokens of one sequence with `read`. The pool knows nothing of who owns a block.

    Args:
        scratch: one block more, number `num_blocks`, that nobody owns: rows that only pad a batch write there.
    """

    def __init__(
        self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device, *, scratch: bool = False
    ) -> None:
        self.shape, self.num_blocks, self.block_size = shape, num_blocks, block_size
        self.scratch = num_blocks if scratch else None
        self._all_blocks = num_blocks + scratch
        vectors = (shape.num_layers, 2, self._all_blocks * block_size, shape.num_kv_heads)
        # Zeros, not garbage: padded slots are masked out of attention, but 0 * NaN would still be NaN.
        self._values = torch.zeros((*vectors, shape.head_dim), dtype=shape.stored_dtype, device=device)
        self._scales = torch.zeros(vectors, dtype=torch.float16, device=device) if shape.quantised else None

    @classmethod
    def within(
        cls, budget_bytes: int, shape: KVShape, block_size: int, device: torch.device, *, scratch: bool = False
    ) -> "KVPool":
        """The largest pool that stays within a budget, scratch block included.

        Raises:
            SettingError: the budget does not hold a single block.
        """
        num_blocks = budget_bytes // (shape.bytes_per_token * block_size) - scratch
        if num_blocks < 1:
            raise SettingError(
                f"KV budget of {budget_bytes:,} bytes: one block of {block_size} tokens takes "
                f"{shape.bytes_per_token * block_size:,} bytes" + (", and one is for padding" if scratch else "")
            )
        return cls(shape, num_blocks, block_size, device, scratch=scratch)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def layer(self, layer: int) -> KVLayer:
        """The memory of one layer, without a copy."""
        k_scale, v_scale = (None, None) if self._scales is None else self._scales[layer]
        return KVLayer(*self._values[layer], k_scale, v_scale)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that change hands: a request that overflowed leaves NaN, which masks do not stop (0 * NaN)."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._values.device)
        for tensor in self._tensors():
            tensor.view(tensor.shape[0], self._all_blocks, -1).index_fill_(1, index, 0)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at slots [T]."""
        memory = self.layer(layer)
        for new, values, scales in ((k, memory.k, memory.k_scale), (v, memory.v, memory.v_scale)):
            if scales is not None:
                new, scale = quantise(new)
                scales.index_copy_(0, slots, scale)
            values.index_copy_(0, slots, new)

    def gather(self, layer: int, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of sequences, each [S, B * block_size, kv_heads, head_dim], for block_table [S, B].

        Positions beyond a sequence's length hold whatever its blocks held before; the caller masks them.
        """
        rows, columns = block_table.shape
        flat = block_table.flatten()

        def rows_of(tensor: torch.Tensor) -> torch.Tensor:
            blocks = tensor.view(self._all_blocks, -1).index_select(0, flat)
            return blocks.view(rows, columns * self.block_size, *tensor.shape[1:])

        def read(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            if scales is None:
                return rows_of(values)
            return dequantise(rows_of(values), rows_of(scales), self.shape.dtype)

        memory = self.layer(layer)
        return read(memory.k, memory.k_scale), read(memory.v, memory.v_scale)

    def rows(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where `read` finds positions [T] of a sequence in blocks [B], in any layer: int64 [2 * T], K's and then V's."""
        slots = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        return torch.cat((slots, slots + self._all_blocks * self.block_size))

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [T, kv_heads, head_dim], in one launch where they are not quantised."""
        values = self._values[layer].flatten(0, 1).index_select(0, rows)
        if self._scales is not None:
            values = dequantise(values, self._scales[layer].flatten(0, 1).index_select(0, rows), self.shape.dtype)
        k, v = values.chunk(2)
        return k, v

    def _tensors(self) -> list[torch.Tensor]:
        """Views of all its memory, [layers * 2, slots, kv_heads] or with head_dim."""
        return [tensor.flatten(0, 1) for tensor in (self._values, self._scales) if tensor is not None]
