"""Which blocks hold the beginning of a prompt already.

K and V of a token depend on all tokens before it. A block may therefore be reused only where the whole prefix is the same,
and the index is a forest of chains: an entry's key is its parent's block and the block's own tokens.

    (None, (5, 8)) -> 3      [5, 8 | 1, 1] is blocks 3, 7
    (3, (1, 1))    -> 7      [5, 8 | 2, 9] is blocks 3, 4
    (3, (2, 9))    -> 4

All keys live in one dict. Python's dict compares keys after it has found their hash, so that a hit compares tokens, block
by block along the chain, and no collision can pass for a hit.

A block id inside a key must mean the same content for as long as the key exists. Two rules see to that:

- A parent is always an entry, never a request's private block. Two requests may compute the same prefix at the same time.
  The first to publish makes the entries; the other learns which they are and takes them in place of its duplicates, or else
  the entries, pinned by what comes behind them, and the duplicates would both be kept.
- An entry goes only after its children, so that no key outlives its parent.

It follows that a request may hold an entry without holding its parent, and that an unreferenced entry may be pinned by a
descendant. Only the scheduler's thread calls this class.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer_lab.kv.blocks import BlockAllocator, BlockState


class _Key(NamedTuple):
    parent: int | None
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Entry:
    key: _Key
    used: int  # the cache's tick when a request last walked over it
    children: int = 0


class PrefixCache:
    """An index of READONLY blocks by the tokens that they, and all blocks before them, hold.

    `counters`: `queries` and `queried_tokens`, `hits` (queries that found a block) and `hit_tokens`,
    `evicted_blocks`.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator, self._block_size = allocator, block_size
        self._blocks: dict[_Key, int] = {}
        self._entries: dict[int, _Entry] = {}  # by block
        self._tick = 0
        self.counters = {"queries": 0, "hits": 0, "queried_tokens": 0, "hit_tokens": 0, "evicted_blocks": 0}

    def __len__(self) -> int:
        """Number of entries, which is the number of blocks kept."""
        return len(self._entries)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The longest cached prefix in whole blocks. The caller takes its references before anything else happens.

        At least one token is left to be computed: without it there would be no logits.
        """
        self._tick += 1
        blocks: list[int] = []
        for index in range((len(tokens) - 1) // self._block_size):
            block = self._blocks.get(_Key(blocks[-1] if blocks else None, self._slice(tokens, index)))
            if block is None:
                break
            self._entries[block].used = self._tick
            blocks.append(block)
        return blocks

    def count(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Count a match that was made use of. A request that waits for memory matches often, and counts once."""
        self.counters["queries"] += 1
        self.counters["hits"] += bool(blocks)
        self.counters["queried_tokens"] += len(tokens)
        self.counters["hit_tokens"] += len(blocks) * self._block_size

    def publish(self, tokens: Sequence[int], blocks: Sequence[int]) -> dict[int, int]:
        """Make a request's sealed blocks known, once the step that filled them is committed.

        Call it with all sealed blocks whenever one was added: it resumes behind the last one that is an entry, and costs
        no more than what comes after. A block whose tokens are there already, in another block, stays private.

        Args:
            tokens: at least the tokens that `blocks` hold.
            blocks: the request's first blocks, all READONLY and referenced by it.

        Returns:
            Duplicates: index into `blocks` -> the entry that holds the same tokens. The caller takes a reference to it and
            gives its own block back.
        """
        assert len(tokens) >= len(blocks) * self._block_size, f"{len(tokens)} tokens do not fill {len(blocks)} blocks"
        self._tick += 1
        start = len(blocks)
        while start and blocks[start - 1] not in self._entries:
            start -= 1
        parent = blocks[start - 1] if start else None
        duplicates: dict[int, int] = {}
        for index in range(start, len(blocks)):
            key = _Key(parent, self._slice(tokens, index))
            if key not in self._blocks:
                self._add(key, blocks[index])
            parent = self._blocks[key]
            self._entries[parent].used = self._tick
            if parent != blocks[index]:
                duplicates[index] = parent
        return duplicates

    def evict(self, count: int) -> int:
        """Free up to `count` blocks: least recently used first, children before parents.

        Returns:
            How many blocks became FREE. Those that a request or an unfinished fence still holds are left alone.
        """
        self._allocator.reclaim()
        leaves = [(e.used, block) for block, e in self._entries.items() if self._is_idle_leaf(block)]
        heapq.heapify(leaves)
        evicted = 0
        while leaves and evicted < count:
            _used, block = heapq.heappop(leaves)
            parent = self._remove(block)
            evicted += 1
            if parent is not None and self._is_idle_leaf(parent):
                heapq.heappush(leaves, (self._entries[parent].used, parent))
        self.counters["evicted_blocks"] += evicted
        return evicted

    def reclaimable(self) -> int:
        """How many blocks `evict` could free now: idle ones with none but idle ones below them."""
        self._allocator.reclaim()
        pinned: set[int] = set()
        for block in self._entries:
            above = None if self._allocator.idle(block) else block
            while above is not None and above not in pinned:
                pinned.add(above)
                above = self._entries[above].key.parent
        return len(self._entries) - len(pinned)

    def clear(self) -> None:
        """Forget everything. Blocks of live requests become private."""
        for block in self._entries:
            self._allocator.drop(block)
        self._blocks.clear()
        self._entries.clear()

    def check_integrity(self) -> None:
        """Assert that the index, its chains and the allocator's marks agree.

        Raises:
            AssertionError: naming the block, and what is wrong with it.
        """
        children = Counter(entry.key.parent for entry in self._entries.values())
        for block, entry in self._entries.items():
            parent = entry.key.parent
            assert self._blocks.get(entry.key) == block, f"block {block} is not found by its key"
            assert parent is None or parent in self._entries, f"block {block} has lost its parent {parent}"
            assert len(entry.key.tokens) == self._block_size, f"block {block} holds {len(entry.key.tokens)} tokens"
            assert entry.children == children[block], (
                f"block {block} has {children[block]} children, not {entry.children}"
            )
            assert self._allocator.state(block) is BlockState.READONLY, f"block {block} is cached but not readonly"
        assert len(self._blocks) == len(self._entries), (
            f"keys lead to {set(self._blocks.values()) - self._entries.keys()}"
        )
        marked = self._allocator.kept ^ self._entries.keys()
        assert not marked, f"blocks {sorted(marked)} are either kept or an entry, not both"

    def _slice(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def _is_idle_leaf(self, block: int) -> bool:
        return not self._entries[block].children and self._allocator.idle(block)

    def _add(self, key: _Key, block: int) -> None:
        self._allocator.keep(block)
        self._blocks[key] = block
        self._entries[block] = _Entry(key, self._tick)
        if key.parent is not None:
            self._entries[key.parent].children += 1

    def _remove(self, block: int) -> int | None:
        """Take a leaf out of the index. Returns its parent."""
        self._allocator.drop(block)
        key = self._entries.pop(block).key
        del self._blocks[key]
        if key.parent is not None:
            self._entries[key.parent].children -= 1
        return key.parent
