"""Who owns which KV block, and when a block may be handed out again.

    FREE --allocate--> WRITING --seal--> READONLY --release--> PENDING --reclaim--> FREE
                          +--------------release-----------------^

A released block may still be read or written by work that was launched before. It therefore waits in PENDING until every
fence that it was released with has passed. Handing it out earlier is the "ghost reply": another request's text.
Only the scheduler's thread calls this class.
"""

from collections import deque
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
        self._released: list[_Released] = []

    @property
    def free(self) -> int:
        """Blocks that can be handed out now. PENDING ones do not count."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for writing, or None (and no change) where fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._state[block] = BlockState.WRITING
        return blocks

    def seal(self, blocks: Iterable[int]) -> None:
        """Mark full blocks as READONLY."""
        for block in blocks:
            self._expect(block, BlockState.WRITING)
            self._state[block] = BlockState.READONLY

    def release(self, blocks: Sequence[int], fences: Iterable[Fence]) -> None:
        """Give blocks back. They become FREE once all `fences` have passed and `reclaim` has seen it."""
        for block in blocks:
            self._expect(block, BlockState.WRITING, BlockState.READONLY)
            self._state[block] = BlockState.PENDING
        self._released.append(_Released(tuple(blocks), tuple(fences)))

    def reclaim(self) -> int:
        """Move blocks whose fences have passed from PENDING to FREE, without waiting. Returns how many."""
        still_pending, freed = [], 0
        for release in self._released:
            if all(fence.query() for fence in release.fences):
                for block in release.blocks:
                    self._state[block] = BlockState.FREE
                self._free.extend(release.blocks)
                freed += len(release.blocks)
            else:
                still_pending.append(release)
        self._released = still_pending
        return freed

    def counts(self) -> dict[str, int]:
        """Number of blocks in each state, by the state's name."""
        return {state.value: self._state.count(state) for state in BlockState}

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that every block is in exactly one place.

        Args:
            owned: the block lists of all live requests.

        Raises:
            AssertionError: a block that is lost, in two places, or in a state that its place does not allow.
        """
        places: dict[int, str] = {}

        def put(block: int, place: str, *allowed: BlockState) -> None:
            assert block not in places, f"block {block} is both {places[block]} and {place}"
            assert self._state[block] in allowed, f"block {block} is {place} but in state {self._state[block].value}"
            places[block] = place

        for block in self._free:
            put(block, "free", BlockState.FREE)
        for release in self._released:
            for block in release.blocks:
                put(block, "pending", BlockState.PENDING)
        for blocks in owned:
            for block in blocks:
                put(block, "owned", BlockState.WRITING, BlockState.READONLY)
        lost = set(range(self.num_blocks)) - places.keys()
        assert not lost, f"blocks {sorted(lost)} are nowhere"

    def _expect(self, block: int, *states: BlockState) -> None:
        state = self._state[block]
        assert state in states, f"block {block} is {state.value}, expected {' or '.join(s.value for s in states)}"
