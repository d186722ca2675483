"""Block states, and the one promise that matters: a block that may still be read is never handed out."""

from collections import deque

import pytest
from fences import FakeFence
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_lab.kv.blocks import BlockAllocator, BlockState


def counts(free: int = 0, writing: int = 0, readonly: int = 0, pending: int = 0, cached: int = 0) -> dict[str, int]:
    """What `BlockAllocator.counts` gives: no key for cached blocks where there are none."""
    found = {"free": free, "writing": writing, "readonly": readonly, "pending": pending}
    return found | {"cached": cached} if cached else found


def test_a_block_goes_through_its_states():
    allocator, fence = BlockAllocator(4), FakeFence()
    assert allocator.counts() == counts(free=4)
    blocks = allocator.allocate(3)
    assert sorted(set(blocks)) == sorted(blocks)
    assert set(blocks) <= set(range(4))
    assert allocator.counts() == counts(free=1, writing=3)
    allocator.seal(blocks[:2])
    assert allocator.counts() == counts(free=1, writing=1, readonly=2)
    allocator.release(blocks, [fence])
    assert allocator.counts() == counts(free=1, pending=3)
    assert allocator.reclaim() == 0
    fence.passed = True
    assert allocator.counts() == counts(free=1, pending=3)  # nobody has looked yet
    assert allocator.reclaim() == 3
    assert allocator.counts() == counts(free=4)
    assert allocator.free == 4
    allocator.check_integrity([])


def test_allocate_gives_all_or_nothing():
    allocator = BlockAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.counts() == counts(free=3)
    assert allocator.allocate(0) == []
    assert sorted(allocator.allocate(3)) == [0, 1, 2]
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []


def test_a_pending_block_is_not_handed_out():
    allocator, fence = BlockAllocator(2), FakeFence()
    blocks = allocator.allocate(2)
    allocator.release(blocks, [fence])
    for _ in range(3):
        allocator.reclaim()
        assert allocator.free == 0
        assert allocator.allocate(1) is None
    fence.passed = True
    assert allocator.allocate(1) is None  # a fence that passed counts once `reclaim` has seen it
    allocator.reclaim()
    assert sorted(allocator.allocate(2)) == sorted(blocks)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_every_fence_must_pass_in_whatever_order(order):
    allocator, fences = BlockAllocator(1), [FakeFence() for _ in range(3)]
    allocator.release(allocator.allocate(1), fences)
    for index in order:
        assert allocator.reclaim() == 0
        fences[index].passed = True
    assert allocator.reclaim() == 1


def test_later_releases_do_not_wait_for_earlier_ones():
    allocator, slow, fast = BlockAllocator(2), FakeFence(), FakeFence(passed=True)
    first, second = allocator.allocate(1), allocator.allocate(1)
    allocator.release(first, [slow])
    allocator.release(second, [fast])
    assert allocator.reclaim() == 1
    assert allocator.allocate(1) == second
    allocator.check_integrity([second])


def test_no_fences_still_need_a_reclaim():
    allocator = BlockAllocator(1)
    allocator.release(allocator.allocate(1), [])
    assert allocator.counts() == counts(pending=1)
    assert allocator.reclaim() == 1


def test_fences_may_come_from_a_generator():
    allocator, fence = BlockAllocator(1), FakeFence()
    allocator.release(allocator.allocate(1), (f for f in [fence]))
    assert [allocator.reclaim(), allocator.reclaim()] == [0, 0]


def test_the_callers_list_is_copied():
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(2)
    allocator.release(blocks, [])
    blocks.clear()
    assert allocator.reclaim() == 2


def test_transitions_that_do_not_exist():
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    other = 1 - block
    with pytest.raises(AssertionError, match=f"block {other} is free, expected writing"):
        allocator.seal([other])
    with pytest.raises(AssertionError, match=f"block {other} is free"):
        allocator.release([other], [])
    allocator.seal([block])
    with pytest.raises(AssertionError, match=f"block {block} is readonly, expected writing"):
        allocator.seal([block])
    allocator.release([block], [])
    with pytest.raises(AssertionError, match=f"block {block} is pending"):
        allocator.release([block], [])
    with pytest.raises(AssertionError, match=f"block {block} is pending"):
        allocator.seal([block])


@pytest.fixture
def busy() -> tuple[BlockAllocator, list[list[int]]]:
    """Six blocks: 0 writing, 1 readonly, 2 and 3 pending, 4 and 5 free."""
    allocator = BlockAllocator(6)
    owned, gone = allocator.allocate(2), allocator.allocate(2)
    allocator.seal(owned[1:])
    allocator.release(gone, [FakeFence()])
    allocator.check_integrity([owned])
    return allocator, [owned]


def test_integrity_of_a_lost_block(busy):
    allocator, owned = busy
    with pytest.raises(AssertionError, match="block 0 has 1 references, not 0"):
        allocator.check_integrity([])
    allocator._free.remove(4)
    with pytest.raises(AssertionError, match="block 4 is free but 0 times in the free queue"):
        allocator.check_integrity(owned)


def test_integrity_of_a_pending_block_that_is_lost(busy):
    allocator, owned = busy
    allocator._released.clear()
    with pytest.raises(AssertionError, match="block 2 waits for 1 releases, not 0"):
        allocator.check_integrity(owned)


def test_integrity_of_two_owners(busy):
    allocator, owned = busy
    with pytest.raises(AssertionError, match="block 1 has 1 references, not 2"):
        allocator.check_integrity([*owned, [1]])


def test_integrity_of_one_owner_twice(busy):
    allocator, _owned = busy
    with pytest.raises(AssertionError, match="block 0 has 1 references, not 2"):
        allocator.check_integrity([[0, 1, 0]])


@pytest.mark.parametrize("block", [2, 4])  # pending, free
def test_integrity_of_an_owner_of_what_was_given_back(busy, block):
    allocator, owned = busy
    with pytest.raises(AssertionError, match=f"block {block} has 0 references, not 1"):
        allocator.check_integrity([*owned, [block]])


@pytest.mark.parametrize("block", [0, 1, 2])
def test_integrity_of_a_block_that_is_free_too_early(busy, block):
    allocator, owned = busy
    allocator._free.append(block)
    with pytest.raises(AssertionError, match=f"block {block} is .* but 1 times in the free queue"):
        allocator.check_integrity(owned)


def test_integrity_of_a_block_that_is_free_twice(busy):
    allocator, owned = busy
    allocator._free = deque([4, 5, 5])
    with pytest.raises(AssertionError, match="block 5 is free but 2 times in the free queue"):
        allocator.check_integrity(owned)


@pytest.mark.parametrize("block", range(6))
def test_integrity_of_any_wrong_state(busy, block):
    allocator, owned = busy
    right = {0: ("writing", "readonly"), 1: ("writing", "readonly"), 2: ("pending",), 3: ("pending",)}
    for state in BlockState:
        if state.value in right.get(block, ("free",)):
            continue
        kept, allocator._state[block] = allocator._state[block], state
        with pytest.raises(AssertionError, match=f"block {block} is"):
            allocator.check_integrity(owned)
        allocator._state[block] = kept
    allocator.check_integrity(owned)


def test_integrity_of_a_block_that_does_not_exist(busy):
    allocator, owned = busy
    with pytest.raises(AssertionError, match=r"blocks \[-1, 6\] do not exist"):
        allocator.check_integrity([*owned, [6, -1]])


def readonly(allocator: BlockAllocator, count: int) -> list[int]:
    blocks = allocator.allocate(count)
    allocator.seal(blocks)
    return blocks


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_shared_block_waits_for_the_fences_of_all_its_owners(order):
    allocator, fences = BlockAllocator(2), [FakeFence(), FakeFence()]
    blocks = readonly(allocator, 1)
    allocator.share(blocks)
    allocator.check_integrity([blocks, blocks])
    allocator.release(blocks, [fences[0]])
    assert allocator.counts() == counts(free=1, readonly=1)
    allocator.check_integrity([blocks])
    allocator.release(blocks, [fences[1]])
    assert allocator.counts() == counts(free=1, pending=1)
    fences[order[0]].passed = True
    assert allocator.reclaim() == 0
    fences[order[1]].passed = True
    assert allocator.reclaim() == 1
    allocator.check_integrity([])


def test_an_early_owners_fence_counts_even_where_it_was_seen_unfinished_long_before():
    allocator, slow = BlockAllocator(1), FakeFence()
    blocks = readonly(allocator, 1)
    allocator.share(blocks)
    allocator.release(blocks, [slow])
    assert allocator.reclaim() == 0
    allocator.release(blocks, [])
    assert allocator.reclaim() == 0  # nothing of the last release is open, but the first reader still reads
    slow.passed = True
    assert allocator.reclaim() == 1


def test_a_fence_is_asked_once_a_release_and_never_again_once_it_passed():
    asked = []

    class Counted(FakeFence):
        def query(self) -> bool:
            asked.append(self)
            return super().query()

    allocator, fence = BlockAllocator(100), Counted()
    blocks = readonly(allocator, 100)
    allocator.share(blocks)
    allocator.release(blocks, [fence])
    allocator.reclaim()
    assert len(asked) == 1
    fence.passed = True
    for _ in range(3):
        allocator.reclaim()
    assert len(asked) == 2
    assert allocator.counts() == counts(readonly=100)


def test_a_kept_block_outlives_its_last_release_and_is_shared_again():
    allocator, fence = BlockAllocator(2), FakeFence()
    blocks = readonly(allocator, 1)
    allocator.keep(blocks[0])
    assert allocator.counts() == counts(free=1, readonly=1)  # referenced: not counted as cached
    allocator.release(blocks, [fence])
    assert allocator.counts() == counts(free=1, cached=1)
    assert not allocator.idle(blocks[0])
    fence.passed = True
    assert allocator.reclaim() == 0
    assert allocator.idle(blocks[0])
    assert allocator.allocate(2) is None  # cached is not free: nothing is evicted by itself
    allocator.share(blocks)
    assert allocator.counts() == counts(free=1, readonly=1)
    allocator.check_integrity([blocks])
    with pytest.raises(AssertionError, match=f"block {blocks[0]} has 1 references, not 0"):
        allocator.check_integrity([])


def test_dropping_a_cached_block_frees_it_at_once_or_once_its_fences_passed():
    allocator, fence = BlockAllocator(2), FakeFence()
    early, late = readonly(allocator, 2)
    for block, fences in ((early, []), (late, [fence])):
        allocator.keep(block)
        allocator.release([block], fences)
    allocator.reclaim()
    allocator.drop(early)
    allocator.drop(late)
    assert allocator.counts() == counts(free=1, pending=1)
    allocator.check_integrity([])
    fence.passed = True
    assert allocator.reclaim() == 1
    assert allocator.allocate(2) == [early, late]


def test_dropping_a_referenced_block_leaves_it_to_its_owner():
    allocator = BlockAllocator(1)
    blocks = readonly(allocator, 1)
    allocator.keep(blocks[0])
    allocator.drop(blocks[0])
    assert allocator.counts() == counts(readonly=1)
    assert allocator.kept == frozenset()
    allocator.release(blocks, [])
    assert allocator.counts() == counts(pending=1)


def test_a_block_released_and_shared_again_before_its_fence_passed_stays_with_its_owner():
    allocator, first, second = BlockAllocator(1), FakeFence(), FakeFence()
    blocks = readonly(allocator, 1)
    allocator.keep(blocks[0])
    allocator.release(blocks, [first])
    allocator.share(blocks)
    first.passed = True
    assert allocator.reclaim() == 0
    allocator.drop(blocks[0])
    assert allocator.counts() == counts(readonly=1)
    allocator.release(blocks, [second])
    assert allocator.reclaim() == 0
    second.passed = True
    assert allocator.reclaim() == 1


def test_references_and_marks_that_do_not_exist():
    allocator = BlockAllocator(3)
    writing, block, cached = allocator.allocate(3)
    allocator.seal([block, cached])
    for change in (lambda: allocator.share([writing]), lambda: allocator.keep(writing)):
        with pytest.raises(AssertionError, match=f"block {writing} is writing, expected readonly"):
            change()
    with pytest.raises(AssertionError, match=f"block {block} is dropped but was not kept"):
        allocator.drop(block)
    allocator.keep(cached)
    with pytest.raises(AssertionError, match=f"block {cached} is kept already"):
        allocator.keep(cached)
    allocator.release([cached], [])
    with pytest.raises(AssertionError, match=f"block {cached} is released but nobody references it"):
        allocator.release([cached], [])
    allocator.check_integrity([[writing, block]])


@pytest.mark.parametrize("state", [BlockState.FREE, BlockState.WRITING, BlockState.PENDING])
def test_integrity_of_a_cached_block_in_another_state(state):
    allocator = BlockAllocator(1)
    allocator.keep(*readonly(allocator, 1))
    allocator.release([0], [])
    allocator._state[0] = state
    with pytest.raises(AssertionError, match="block 0 is"):
        allocator.check_integrity([])


class BlockMachine(RuleBasedStateMachine):
    """Random histories, against a model that keeps one line per block."""

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.allocator = BlockAllocator(size)
        self.state = ["free"] * size
        self.owned: list[list[int]] = []
        self.waiting: list[tuple[list[int], list[FakeFence]]] = []
        self.fences = [FakeFence()]

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        free = self.state.count("free")
        blocks = self.allocator.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is None:
            return
        assert len(set(blocks)) == len(blocks) == count
        for block in blocks:
            assert self.state[block] == "free"
            assert all(block not in held for held, fences in self.waiting if not all(f.passed for f in fences))
            self.state[block] = "writing"
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.owned))
        full = [b for b in blocks if self.state[b] == "writing" and data.draw(st.booleans())]
        self.allocator.seal(full)
        for block in full:
            self.state[block] = "readonly"

    @rule()
    def launch(self) -> None:
        self.fences.append(FakeFence())

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        fences = data.draw(st.lists(st.sampled_from(self.fences), max_size=3))
        self.allocator.release(blocks, fences)
        for block in blocks:
            self.state[block] = "pending"
        self.waiting.append((blocks, fences))

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.fences)).passed = True

    @rule()
    def reclaim(self) -> None:
        done = [blocks for blocks, fences in self.waiting if all(f.passed for f in fences)]
        assert self.allocator.reclaim() == sum(map(len, done))
        self.waiting = [(blocks, fences) for blocks, fences in self.waiting if not all(f.passed for f in fences)]
        for blocks in done:
            for block in blocks:
                self.state[block] = "free"

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity(self.owned)
        assert self.allocator.counts() == {name: self.state.count(name) for name in counts()}
        assert self.allocator.free == self.state.count("free")


BlockMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestBlockMachine = BlockMachine.TestCase
