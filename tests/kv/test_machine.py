"""Random histories of allocator and prefix cache, against a model that knows what every block holds.

Requests come, hit, compute, publish and go in any order; launched work completes in any order. The model knows each block
by all the tokens up to its end, since K and V depend on them, and finds prefixes in a plain dict of tuples.
"""

from dataclasses import dataclass
from itertools import chain, product

import pytest
from fences import FakeFence
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer_lab.kv.blocks import BlockAllocator
from deepinfer_lab.kv.prefix import PrefixCache

BLOCK = 2
# One to three blocks of two kinds, and sometimes a token more: equal prefixes are the rule.
KINDS = ((0, 0), (0, 1))
PROMPTS = [
    (*chain.from_iterable(kinds), *tail) for n in (1, 2, 3) for kinds in product(KINDS, repeat=n) for tail in ((), (5,))
]


@dataclass
class Owner:
    tokens: tuple[int, ...]
    blocks: list[int]
    sealed: int

    def prefix(self, index: int) -> tuple[int, ...]:
        return self.tokens[: (index + 1) * BLOCK]


@dataclass
class Entry:
    block: int
    used: int


class KVMachine(RuleBasedStateMachine):
    allocator_type: type[BlockAllocator] = BlockAllocator

    @initialize(size=st.integers(3, 10))
    def start(self, size: int) -> None:
        self.allocator = self.allocator_type(size)
        self.cache = PrefixCache(self.allocator, BLOCK)
        self.size, self.tick = size, 0
        self.owners: list[Owner] = []
        self.launched: list[FakeFence] = []  # and not complete
        self.covered: list[tuple[list[int], list[FakeFence]]] = []  # blocks that launched work may still touch
        self.content: dict[int, tuple[int, ...] | None] = {}  # None: being written
        self.index: dict[tuple[int, ...], Entry] = {}

    # The model.

    def waiting(self) -> set[int]:
        return {block for blocks, fences in self.covered for block in blocks if not all(f.passed for f in fences)}

    def held(self) -> set[int]:
        return {block for owner in self.owners for block in owner.blocks}

    def evicted(self, index: dict[tuple[int, ...], Entry], count: int) -> list[int]:
        """The blocks that eviction takes, in order: always the least recently used idle leaf. Removes them from `index`."""
        taken: list[int] = []
        busy = self.waiting() | self.held()
        while len(taken) < count:
            parents = {prefix[:-BLOCK] for prefix in index}
            leaves = [p for p, entry in index.items() if p not in parents and entry.block not in busy]
            if not leaves:
                break
            taken.append(index.pop(min(leaves, key=lambda p: index[p].used)).block)
        return taken

    # Requests.

    @rule(tokens=st.sampled_from(PROMPTS), make_room=st.booleans(), at_once=st.booleans())
    def admit(self, tokens: tuple[int, ...], make_room: bool, at_once: bool) -> None:
        self.tick += 1
        found = self.cache.match(tokens)
        self.allocator.share(found)
        owner = Owner(tokens, found, 0)
        while (owner.sealed + 1) * BLOCK < len(tokens) and owner.prefix(owner.sealed) in self.index:
            self.index[owner.prefix(owner.sealed)].used = self.tick
            owner.sealed += 1
        assert owner.blocks == [self.index[owner.prefix(i)].block for i in range(owner.sealed)]
        assert [self.content[block] for block in owner.blocks] == [owner.prefix(i) for i in range(owner.sealed)]
        self.owners.append(owner)
        needed = -(-len(tokens) // BLOCK) - owner.sealed
        if make_room and needed > self.allocator.free:
            self.evict(needed - self.allocator.free)
        if not self.allocate(owner, needed):
            self.end(owner, [])
        elif at_once:
            self.seal(owner, needed)
            self.publish(owner)

    def allocate(self, owner: Owner, count: int) -> bool:
        free = self.allocator.free
        blocks = self.allocator.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is None:
            return False
        assert len(set(blocks)) == len(blocks) == count
        for block in blocks:
            assert block not in self.waiting(), f"block {block} is handed out while a fence still covers it"
            assert block not in self.held(), f"block {block} is handed out while a request holds it"
            self.content[block] = None
        owner.blocks = owner.blocks + blocks
        return True

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.integers(1, 3), publish=st.booleans())
    def compute(self, data: st.DataObject, count: int, publish: bool) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.seal(owner, count)
        if publish:
            self.publish(owner)

    def seal(self, owner: Owner, count: int) -> None:
        full = min(owner.sealed + count, len(owner.tokens) // BLOCK)
        for index in range(owner.sealed, full):
            self.allocator.seal([owner.blocks[index]])
            self.content[owner.blocks[index]] = owner.prefix(index)
        owner.sealed = full

    def publish(self, owner: Owner) -> None:
        self.tick += 1
        self.cache.publish(owner.tokens, owner.blocks[: owner.sealed])
        entries = [entry.block for entry in self.index.values()]
        own = [index for index in range(owner.sealed) if owner.blocks[index] in entries]
        for index in range(own[-1] + 1 if own else 0, owner.sealed):
            self.index.setdefault(owner.prefix(index), Entry(owner.blocks[index], 0)).used = self.tick

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        if data.draw(st.booleans()):
            self.launched.append(FakeFence())
        self.end(owner, [fence for fence in self.launched if data.draw(st.booleans())])

    def end(self, owner: Owner, fences: list[FakeFence]) -> None:
        self.owners = [other for other in self.owners if other is not owner]
        self.allocator.release(owner.blocks, fences)
        self.covered.append((owner.blocks, fences))

    # Everything else that happens.

    @precondition(lambda self: self.launched)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.launched.pop(data.draw(st.integers(0, len(self.launched) - 1))).passed = True

    # Nothing can happen before the first request: a run in which Hypothesis leaves `admit` out ends at once.
    @precondition(lambda self: self.covered)
    @rule()
    def reclaim(self) -> None:
        self.covered = [(blocks, fences) for blocks, fences in self.covered if not all(f.passed for f in fences)]
        free = self.allocator.free
        assert self.allocator.reclaim() == self.allocator.free - free
        entries = {entry.block for entry in self.index.values()}
        # Whatever is free too early, `allocate` finds. Here: nothing is held back longer than it must.
        assert self.allocator.free >= self.size - len(self.held() | self.waiting() | entries)

    @precondition(lambda self: self.index)
    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        self.reclaim()
        free = self.allocator.free
        possible = len(self.evicted(dict(self.index), self.size))
        assert self.cache.reclaimable() == possible, f"{possible} blocks could be evicted"
        taken = self.evicted(self.index, count)
        assert self.cache.evict(count) == len(taken)
        assert self.allocator.free == free + len(taken)

    @precondition(lambda self: len(self.index) > 3)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.index.clear()

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity([owner.blocks for owner in self.owners])
        self.cache.check_integrity()
        entries = {entry.block for entry in self.index.values()}
        assert self.allocator.kept == entries
        counts = self.allocator.counts()
        assert sum(counts.values()) == self.size
        assert counts["cached"] == len(entries - self.held())
        for owner in self.owners:
            for index in range(owner.sealed):
                assert self.content[owner.blocks[index]] == owner.prefix(index), "a request reads what another wrote"


KVMachine.TestCase.settings = settings(deadline=None, max_examples=200, stateful_step_count=100)
TestKVMachine = KVMachine.TestCase


class Hasty(BlockAllocator):
    """Skips PENDING."""

    def release(self, blocks, fences):
        super().release(blocks, ())
        self.reclaim()


class Forgetful(BlockAllocator):
    """Minds the fences of a block's last release only."""

    def release(self, blocks, fences):
        shared = [block for block in blocks if self._references[block] > 1]
        super().release([block for block in blocks if block not in shared], fences)
        super().release(shared, ())


@pytest.mark.parametrize("broken", [Hasty, Forgetful])
def test_the_machine_finds_what_is_broken(broken):
    """Where the block is handed out, or where the cache offers it."""
    machine = type("Machine", (KVMachine,), {"allocator_type": broken})
    once = settings(
        machine.TestCase.settings, max_examples=1000, derandomize=True, phases=[Phase.generate], database=None
    )
    with pytest.raises(AssertionError, match=r"while a fence still covers it|blocks could be evicted"):
        run_state_machine_as_test(machine, settings=settings(once, report_multiple_bugs=False))
