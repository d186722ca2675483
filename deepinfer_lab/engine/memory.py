"""The KV blocks of sequences: what they start with, how they grow, what they share, how they give it back."""

from collections.abc import Iterable

import numpy as np

from deepinfer_lab.engine.request import Sequence
from deepinfer_lab.kv.blocks import BlockAllocator, Fence
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.kv.prefix import PrefixCache


class SequenceMemory:
    """Hands blocks of the pool to sequences and takes them back. Holds no sequence itself.

    Args:
        kv: the pool that the block ids belong to.
        prefix_cache: keep full blocks after their request has ended, for requests that begin with the same tokens.
    """

    def __init__(self, kv: KVPool, *, prefix_cache: bool) -> None:
        self._kv = kv
        self.allocator = BlockAllocator(kv.num_blocks)
        self._unclean: list[int] = []  # handed out, and still with what their last owner left in them
        self.prefix = PrefixCache(self.allocator, kv.block_size) if prefix_cache else None

    def start(self, sequence: Sequence, spare: int) -> bool:
        """Give a sequence blocks for all tokens that it has, cached ones first.

        Args:
            spare: blocks that must remain free or evictable afterwards.

        Returns:
            False, and nothing has changed, where there are too few.
        """
        hits = self.prefix.match(sequence.tokens) if self.prefix is not None else []
        self.allocator.share(hits)
        fresh = self._allocate(self._blocks_for(len(sequence.tokens)) - len(hits), spare)
        if fresh is None:
            self.allocator.release(hits, ())
            return False
        if self.prefix is not None:
            self.prefix.count(sequence.tokens, hits)
        sequence.blocks = hits + fresh
        sequence.block_table = np.array(sequence.blocks)
        sequence.sealed = len(hits)
        sequence.computed = sequence.launched = len(hits) * self._kv.block_size
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Make room for the next token that a sequence computes. False, and nothing has changed, where no block can be had."""
        fresh = self._allocate(self._blocks_for(sequence.launched + 1) - len(sequence.blocks), spare=0)
        if fresh is None:
            return False
        sequence.blocks += fresh
        sequence.block_table = np.array(sequence.blocks)
        return True

    def scrub(self) -> None:
        """Zero all blocks handed out since the last call. To be called before anything is launched that reads them."""
        if self._unclean:
            self._kv.clear(self._unclean)
            self._unclean = []

    def seal(self, sequence: Sequence, full: int, fences: Iterable[Fence]) -> None:
        """Note that the first `full` blocks of a sequence will not be written again, and make them known.

        Where another request was first with the same tokens, the sequence goes on with that one's block, and its own can be
        handed out again once `fences` have passed: what is in flight may still read it.
        """
        self.allocator.seal(sequence.blocks[sequence.sealed : full])
        sequence.sealed = full
        if self.prefix is not None:
            for index, entry in self.prefix.publish(sequence.tokens, sequence.blocks[:full]).items():
                self.allocator.share([entry])
                self.allocator.release([sequence.blocks[index]], fences)
                sequence.blocks[index] = sequence.block_table[index] = entry

    def release(self, sequence: Sequence, fences: Iterable[Fence]) -> None:
        """Take all blocks back. They can be handed out again once `fences` have passed."""
        if sequence.blocks:
            self.allocator.release(sequence.blocks, fences)
        sequence.blocks, sequence.computed, sequence.launched, sequence.sealed = [], 0, 0, 0

    def gain(self, sequence: Sequence) -> int:
        """Blocks that could be had at once by taking this sequence's: nobody else references them, no fence covers them."""
        return sum(self.allocator.sole(block) for block in sequence.blocks)

    def counts(self) -> dict[str, int]:
        """Blocks by state, and those cached without a reference."""
        self.allocator.reclaim()
        return {"cached": 0, **self.allocator.counts()}

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Assert that every block is in exactly one place."""
        self.allocator.check_integrity(sequence.blocks for sequence in live)
        if self.prefix is not None:
            self.prefix.check_integrity()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._kv.block_size)

    def _allocate(self, count: int, spare: int) -> list[int] | None:
        missing = count + spare - self.allocator.free
        if missing > 0:
            self.allocator.reclaim()
            missing = count + spare - self.allocator.free
        if missing > 0:
            if self.prefix is None or self.prefix.reclaimable() < missing:
                return None  # and what is cached stays so
            self.prefix.evict(count - self.allocator.free)
        blocks = self.allocator.allocate(count)
        self._unclean += blocks or ()
        return blocks
