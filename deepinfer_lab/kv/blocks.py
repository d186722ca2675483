"""Who owns which KV block, and when a block may be handed out again.

    FREE --allocate--> WRITING --seal--> READONLY --last release--> PENDING --reclaim--> FREE
                          +--------------release-----------------------^

A released block may still be read or written by work that was launched before. It therefore waits in PENDING until every
fence that it was ever released with has passed. Handing it out earlier is the "ghost reply": another request's text.

Requests may share a READONLY block. Each holds one reference, and only the last release lets go of the block. A block that
the prefix cache keeps does not even go then: it stays READONLY with no reference, is counted as *cached*, and can be shared
again until the cache drops it.

Only the scheduler's thread calls this class.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Fence(Protocol):
    """Something launched earlier whose completion can be asked for without waiting, such as a CUDA event."""

    def query(self) -> bool: ...


class BlockState(Enum):
    FREE = "free"
    WRITING = "writing"
    READONLY = "readonly"
    PENDING = "pending"


@dataclass(frozen=True)
class _Released:
    blocks: tuple[int, ...]
    fences: tuple[Fence, ...]


class BlockAllocator:
    """Hands out block ids 0 .. num_blocks - 1 and follows the state of each."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._state = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._kept: set[int] = set()
        # Releases whose fences `reclaim` has not seen pass, and how many of them name each block. A fence is asked once
        # per release, not once per block, and a block that many requests let go needs no list of fences of its own.
        self._released: list[_Released] = []
        self._waits = [0] * num_blocks

    @property
    def free(self) -> int:
        """Blocks that can be handed out now. PENDING and cached ones do not count."""
        return len(self._free)

    @property
    def kept(self) -> frozenset[int]:
        """Blocks that the prefix cache keeps, referenced or not."""
        return frozenset(self._kept)

    def state(self, block: int) -> BlockState:
        return self._state[block]

    def idle(self, block: int) -> bool:
        """Whether nobody references a block and `reclaim` has seen all its fences pass: dropped, it would be FREE."""
        return not self._references[block] and not self._waits[block]

    def sole(self, block: int) -> bool:
        """Whether one reference is all that keeps a block, and no fence."""
        return self._references[block] == 1 and not self._waits[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for writing, or None (and no change) where fewer are free. The caller is their one owner."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._state[block] = BlockState.WRITING
            self._references[block] = 1
        return blocks

    def seal(self, blocks: Iterable[int]) -> None:
        """Mark full blocks as READONLY."""
        for block in blocks:
            self._expect(block, BlockState.WRITING)
            self._state[block] = BlockState.READONLY

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to READONLY blocks, cached ones included."""
        for block in blocks:
            self._expect(block, BlockState.READONLY)
            self._references[block] += 1

    def release(self, blocks: Sequence[int], fences: Iterable[Fence]) -> None:
        """Give up one reference to each block.

        A block without references is cached where the prefix cache keeps it, else PENDING. It becomes FREE once the
        fences of all its releases have passed and `reclaim` has seen it.
        """
        for block in blocks:
            self._expect(block, BlockState.WRITING, BlockState.READONLY)
            assert self._references[block], f"block {block} is released but nobody references it"
            self._references[block] -= 1
            self._waits[block] += 1
            if not self._references[block] and block not in self._kept:
                self._state[block] = BlockState.PENDING
        self._released.append(_Released(tuple(blocks), tuple(fences)))

    def keep(self, block: int) -> None:
        """Let the prefix cache hold a READONLY block: it outlives its last release."""
        self._expect(block, BlockState.READONLY)
        assert block not in self._kept, f"block {block} is kept already"
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """Undo `keep`. A cached block becomes FREE where it is idle, else PENDING; a referenced one stays READONLY."""
        assert block in self._kept, f"block {block} is dropped but was not kept"
        self._kept.remove(block)
        if self.idle(block):
            self._set_free(block)
        elif not self._references[block]:
            self._state[block] = BlockState.PENDING

    def reclaim(self) -> int:
        """Look at all fences, without waiting. Returns how many blocks this moved from PENDING to FREE."""
        still_waiting, free = [], len(self._free)
        for release in self._released:
            if not all(fence.query() for fence in release.fences):
                still_waiting.append(release)
                continue
            for block in release.blocks:
                self._waits[block] -= 1
                if self._state[block] is BlockState.PENDING and not self._waits[block]:
                    self._set_free(block)
        self._released = still_waiting
        return len(self._free) - free

    def counts(self) -> Counter[str]:
        """Number of blocks in each state, by the state's name, and of "cached" ones. They add up to `num_blocks`.

        A cached block does not count as "readonly" too. Without any there is no such key, which a Counter reads as 0.
        """
        counts = Counter({state.value: self._state.count(state) for state in BlockState})
        if cached := sum(not self._references[block] for block in self._kept):
            counts["readonly"] -= cached
            counts["cached"] = cached
        return counts

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that every block is in exactly one place, and that references and waits add up.

        Args:
            owned: the block lists of all live requests.

        Raises:
            AssertionError: naming the block, and what is wrong with it.
        """
        owners = Counter(block for blocks in owned for block in blocks)
        waits = Counter(block for release in self._released for block in release.blocks)
        queued = Counter(self._free)
        for block, state in enumerate(self._state):
            references = self._references[block]
            assert references == owners[block], f"block {block} has {references} references, not {owners[block]}"
            assert waits[block] == self._waits[block], (
                f"block {block} waits for {self._waits[block]} releases, not {waits[block]}"
            )
            expected = int(state is BlockState.FREE)
            assert queued[block] == expected, (
                f"block {block} is {state.value} but {queued[block]} times in the free queue"
            )
            if block in self._kept or references > 1:
                self._expect(block, BlockState.READONLY)
            elif references:
                self._expect(block, BlockState.WRITING, BlockState.READONLY)
            else:
                self._expect(block, BlockState.PENDING if waits[block] else BlockState.FREE)
        unknown = owners.keys() - range(self.num_blocks)
        assert not unknown, f"blocks {sorted(unknown)} do not exist"

    def _set_free(self, block: int) -> None:
        self._state[block] = BlockState.FREE
        self._free.append(block)

    def _expect(self, block: int, *states: BlockState) -> None:
        state = self._state[block]
        assert state in states, f"block {block} is {state.value}, expected {' or '.join(s.value for s in states)}"
