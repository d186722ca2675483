"""The memory of the paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer_lab.errors import SettingError


@dataclass(frozen=True)
class KVShape:
    """What one token costs: K and V in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """K and V of all layers, [layers, num_blocks * block_size, kv_heads, head_dim] each.

    A token's *slot* is block * block_size + offset. A model forward writes new tokens with `write` and reads whole
    sequences, block by block, with `gather`. The pool knows nothing of who owns a block.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        size = (shape.num_layers, num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, not garbage: padded slots are masked out of attention, but 0 * NaN would still be NaN.
        self._k = torch.zeros(size, dtype=shape.dtype, device=device)
        self._v = torch.zeros(size, dtype=shape.dtype, device=device)

    @classmethod
    def within(cls, budget_bytes: int, shape: KVShape, block_size: int, device: torch.device) -> "KVPool":
        """The largest pool that stays within a budget.

        Raises:
            SettingError: the budget does not hold a single block.
        """
        num_blocks = budget_bytes // (shape.bytes_per_token * block_size)
        if num_blocks < 1:
            raise SettingError(
                f"KV budget of {budget_bytes:,} bytes: one block of {block_size} tokens takes "
                f"{shape.bytes_per_token * block_size:,} bytes"
            )
        return cls(shape, num_blocks, block_size, device)

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that change hands: a request that overflowed leaves NaN, which masks do not stop (0 * NaN)."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._k.device)
        for pool in (self._k, self._v):
            pool.view(pool.shape[0], self.num_blocks, -1).index_fill_(1, index, 0)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at slots [T]."""
        self._k[layer].index_copy_(0, slots, k)
        self._v[layer].index_copy_(0, slots, v)

    def gather(self, layer: int, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of sequences, each [S, B * block_size, kv_heads, head_dim], for block_table [S, B].

        Positions beyond a sequence's length hold whatever its blocks held before; the caller masks them.
        """
        rows, columns = block_table.shape
        flat = block_table.flatten()

        def view(pool: torch.Tensor) -> torch.Tensor:
            blocks = pool[layer].view(self.num_blocks, -1).index_select(0, flat)
            return blocks.view(rows, columns * self.block_size, *pool.shape[2:])

        return view(self._k), view(self._v)
