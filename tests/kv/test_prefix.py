"""The prefix index: a hit is the same tokens along the whole chain, in blocks that nobody else may change."""

import pytest
from fences import FakeFence

from deepinfer_lab.kv.blocks import BlockAllocator
from deepinfer_lab.kv.prefix import PrefixCache

BLOCK = 2


class Cache(PrefixCache):
    """With an allocator of its own, and shorthands for a request's life."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.allocator = BlockAllocator(num_blocks)
        super().__init__(self.allocator, BLOCK)

    def computed(self, tokens: list[int]) -> list[int]:
        """The full blocks of a request that missed, sealed and not yet published."""
        blocks = self.allocator.allocate(len(tokens) // BLOCK)
        self.allocator.seal(blocks)
        return blocks

    def finished(self, tokens: list[int]) -> list[int]:
        """Entries of a request that has come and gone."""
        blocks = self.computed(tokens)
        self.publish(tokens, blocks)
        self.leave(blocks)
        return blocks

    def acquire(self, tokens: list[int]) -> list[int]:
        """What a request does that begins with these tokens."""
        blocks = self.match(tokens)
        self.allocator.share(blocks)
        self.count(tokens, blocks)
        return blocks

    def leave(self, blocks: list[int]) -> None:
        self.allocator.release(blocks, [])
        self.allocator.reclaim()

    def peek(self, tokens: list[int]) -> list[int]:
        """What a query with one more token would find."""
        blocks = self.acquire([*tokens, -1])
        self.leave(blocks)
        return blocks

    def check(self, *owned: list[int]) -> None:
        self.allocator.check_integrity(owned)
        self.check_integrity()


def test_the_longest_prefix_in_whole_blocks():
    cache = Cache()
    blocks = cache.finished([1, 2, 3, 4, 5, 6])
    assert cache.peek([1, 2, 3, 4, 5, 6]) == blocks
    assert cache.peek([1, 2, 3, 4, 5, 7]) == blocks[:2]
    assert cache.peek([1, 2, 3]) == blocks[:1]
    assert cache.peek([1, 9, 3, 4, 5, 6]) == []  # later blocks do not count without the first
    assert cache.peek([3, 4]) == []  # the same tokens at another position
    cache.check()


@pytest.mark.parametrize(("length", "found"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3), (8, 3)])
def test_one_token_is_left_to_compute(length, found):
    cache = Cache()
    tokens = list(range(6))
    blocks = cache.finished(tokens)
    assert cache.acquire([*tokens, 6, 7][:length]) == blocks[:found]


def test_acquired_blocks_are_referenced_until_released():
    cache = Cache(4)
    blocks = cache.finished([1, 2, 3, 4])
    held = cache.acquire([1, 2, 3, 4, 5])
    assert held == blocks
    assert cache.evict(4) == 0
    cache.check(held)
    cache.leave(held)
    assert cache.evict(4) == 2
    cache.check()
    assert cache.allocator.free == 4


def test_counters():
    cache = Cache()
    cache.finished([1, 2, 3, 4])
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 9, 9], [9], [2, 1, 3]):
        cache.leave(cache.acquire(tokens))
    cache.evict(1)
    assert cache.counters == {
        "queries": 4, "hits": 2, "queried_tokens": 13, "hit_tokens": 6, "evicted_blocks": 1
    }  # fmt: skip


def test_tokens_are_compared_not_only_their_hashes():
    """In CPython hash(-1) == hash(-2), so that the two keys collide."""
    assert hash((-1, -1)) == hash((-2, -2))
    cache = Cache()
    first, second = cache.finished([-1, -1]), cache.finished([-2, -2])
    assert cache.peek([-1, -1]) == first
    assert cache.peek([-2, -2]) == second
    assert cache.peek([-1, -2]) == []


def test_branches_share_their_trunk():
    cache = Cache()
    trunk = cache.finished([1, 2, 3, 4])
    held = cache.acquire([1, 2, 3, 4, 5, 6])
    own = cache.computed([5, 6])
    cache.publish([1, 2, 3, 4, 5, 6], held + own)
    other = cache.acquire([1, 2, 3, 4, 7, 8])
    more = cache.computed([7, 8])
    cache.publish([1, 2, 3, 4, 7, 8], other + more)
    cache.check(held + own, other + more)
    assert cache.peek([1, 2, 3, 4, 5, 6]) == trunk + own
    assert cache.peek([1, 2, 3, 4, 7, 8]) == trunk + more
    assert len(cache) == 4


def test_only_sealed_blocks_are_published():
    cache = Cache()
    (block,) = cache.allocator.allocate(1)
    with pytest.raises(AssertionError, match=f"block {block} is writing, expected readonly"):
        cache.publish([1, 2], [block])
    with pytest.raises(AssertionError, match="1 tokens do not fill 1 blocks"):
        cache.publish([1], [block])
    cache.check([block])


def test_a_duplicate_stays_private_and_is_not_kept():
    cache = Cache()
    tokens = [1, 2, 3, 4]
    first, second = cache.computed(tokens), cache.computed(tokens)
    cache.publish(tokens, first)
    cache.publish(tokens, second)
    cache.check(first, second)
    assert cache.peek(tokens) == first
    cache.leave(second)
    assert cache.allocator.free == 16 - 2
    cache.check(first)


def test_what_follows_a_private_duplicate_hangs_on_the_entry():
    """Were its parent the duplicate, the key would survive the duplicate's next life and hand out foreign K and V."""
    cache = Cache(5)
    tokens = [1, 2, 3, 4, 5, 6]
    first, second = cache.computed(tokens[:4]), cache.computed(tokens)
    cache.publish(tokens, first)
    for sealed in (1, 2, 3):
        cache.publish(tokens, second[:sealed])
        cache.check(first, second)
    assert cache.peek(tokens) == [*first, second[2]]
    cache.leave(second)
    reused = cache.computed([7, 8, 9, 9])
    assert reused == second[:2]
    cache.publish([7, 8, 9, 9], reused)
    assert cache.peek([7, 8, 9, 9, 5, 6]) == reused
    assert cache.peek(tokens) == [*first, second[2]]
    cache.check(first, reused)


def test_the_entry_above_a_duplicate_is_pinned_by_its_child_alone():
    """The duplicate's request does not reference the entry that its next block hangs on."""
    cache = Cache(8)
    tokens = [1, 2, 3, 4]
    first, second = cache.computed(tokens[:2]), cache.computed(tokens)
    cache.publish(tokens, first)
    cache.publish(tokens, second)
    cache.leave(first)
    assert cache.allocator.idle(first[0])
    assert cache.reclaimable() == cache.evict(9) == 0
    cache.check(second)
    cache.leave(second)
    assert cache.reclaimable() == 2
    assert cache.evict(9) == 2
    cache.check()


def test_the_entry_above_a_duplicate_may_be_evicted_and_its_block_used_elsewhere_before_the_next_publish():
    """A request that remembered the entry's block id would now hang its next block on a foreign prefix."""
    cache = Cache(5)
    tokens = [1, 2, 3, 4]
    first, second = cache.computed(tokens[:2]), cache.computed(tokens)
    cache.publish(tokens, first)
    cache.publish(tokens, second[:1])
    cache.leave(first)
    assert cache.evict(1) == 1
    foreign = cache.computed([8, 8, 8, 8, 8, 8])
    assert first[0] in foreign
    cache.publish([8] * 6, foreign)
    cache.publish(tokens, second)
    assert cache.peek(tokens) == second  # the duplicate itself fills the gap
    assert cache.peek([8] * 6) == foreign
    cache.check(foreign, second)


def test_publishing_again_reads_only_what_is_new():
    class Slices(list):
        taken = 0

        def __getitem__(self, index):
            self.taken += 1
            return super().__getitem__(index)

    cache = Cache(64)
    tokens = Slices(range(60))
    blocks = cache.computed(tokens)
    for sealed in range(1, 31):
        tokens.taken = 0
        cache.publish(tokens, blocks[:sealed])
        assert tokens.taken == 1
    cache.publish(tokens, blocks)
    assert tokens.taken == 1
    assert cache.peek(list(tokens)) == blocks


def test_least_recently_used_goes_first():
    cache = Cache()
    a, b, c = (cache.finished([token, token]) for token in (1, 2, 3))
    cache.peek([1, 1])
    cache.publish([2, 2], duplicate := cache.computed([2, 2]))  # computed again: used again
    order = []
    while cache.evict(1):
        order.append(next(block for block in (*a, *b, *c) if block not in cache.allocator.kept and block not in order))
    assert order == [*c, *a, *b]
    cache.check(duplicate)


def test_children_go_before_their_parents_even_where_they_were_used_later():
    cache = Cache()
    trunk = cache.finished([1, 1, 2, 2])
    held = cache.acquire([1, 1, 2, 2, 3])
    leaf = cache.computed([3, 3])
    cache.publish([1, 1, 2, 2, 3, 3], held + leaf)
    cache.leave(held + leaf)
    other = cache.finished([9, 9])  # newer than all of the chain
    for left in ([*trunk, *other], [trunk[0], *other], other, []):
        assert cache.evict(1) == 1
        assert cache.allocator.kept == set(left)
        cache.check()
    assert cache.evict(1) == 0


def test_fenced_blocks_do_not_count_and_pin_what_is_above_them():
    cache = Cache()
    fence = FakeFence()
    blocks = cache.computed([1, 1, 2, 2, 3, 3])
    cache.publish([1, 1, 2, 2, 3, 3], blocks)
    cache.allocator.release([blocks[1]], [fence])
    cache.allocator.release([blocks[0], blocks[2]], [])
    assert cache.reclaimable() == 1
    assert cache.evict(9) == 1
    assert cache.allocator.counts()["pending"] == 0
    cache.check()
    fence.passed = True
    assert cache.reclaimable() == cache.evict(9) == 2
    assert cache.allocator.free == 16


def test_evict_and_reclaimable_look_at_the_fences_themselves():
    for ask in (lambda cache: cache.evict(1), PrefixCache.reclaimable):
        cache, fence = Cache(), FakeFence()
        blocks = cache.computed([1, 1])
        cache.publish([1, 1], blocks)
        cache.allocator.release(blocks, [fence])
        assert ask(cache) == 0
        fence.passed = True
        assert ask(cache) == 1


def test_an_early_readers_fence_holds_a_cached_block():
    cache, slow = Cache(), FakeFence()
    cache.finished([1, 1])
    early, late = cache.acquire([1, 1, 1]), cache.acquire([1, 1, 1])
    cache.allocator.release(early, [slow])
    cache.leave(late)
    assert cache.reclaimable() == cache.evict(1) == 0
    again = cache.acquire([1, 1, 1])  # to be read by one more is harmless
    assert again == early
    slow.passed = True
    assert cache.reclaimable() == 0
    cache.leave(again)
    assert cache.reclaimable() == cache.evict(1) == 1


def test_clear_forgets_everything_and_leaves_live_requests_alone():
    cache, fence = Cache(), FakeFence()
    idle = cache.finished([1, 1])
    live = cache.computed([2, 2])
    fenced = cache.computed([3, 3])
    cache.publish([2, 2], live)
    cache.publish([3, 3], fenced)
    cache.allocator.release(fenced, [fence])
    cache.clear()
    assert len(cache) == 0
    assert cache.peek([1, 1]) == cache.peek([2, 2]) == cache.peek([3, 3]) == []
    assert cache.allocator.counts() == {"free": 14, "writing": 0, "readonly": 1, "pending": 1}
    assert idle[0] not in cache.allocator.kept
    cache.check(live)
    cache.publish([2, 2, 4, 4], live + (more := cache.computed([4, 4])))
    assert cache.peek([2, 2, 4, 4]) == live + more
    cache.check(live + more)


@pytest.fixture
def chain() -> tuple[Cache, list[int]]:
    cache = Cache()
    return cache, cache.finished([1, 1, 2, 2])


def test_integrity_of_a_lost_parent(chain):
    cache, (parent, child) = chain
    cache._entries[parent].children = 0
    cache._remove(parent)
    with pytest.raises(AssertionError, match=f"block {child} has lost its parent {parent}"):
        cache.check_integrity()


def test_integrity_of_a_wrong_count_of_children(chain):
    cache, (parent, _child) = chain
    cache._entries[parent].children = 2
    with pytest.raises(AssertionError, match=f"block {parent} has 1 children, not 2"):
        cache.check_integrity()


def test_integrity_of_an_entry_that_is_not_kept(chain):
    cache, (_parent, child) = chain
    cache.allocator.drop(child)
    with pytest.raises(AssertionError, match=f"block {child} is cached but not readonly"):
        cache.check_integrity()


def test_integrity_of_a_live_entry_that_is_not_kept(chain):
    cache, (_parent, child) = chain
    cache.acquire([1, 1, 2, 2, 3])
    cache.allocator.drop(child)
    with pytest.raises(AssertionError, match=rf"blocks \[{child}\] are either kept or an entry, not both"):
        cache.check_integrity()


def test_integrity_of_a_kept_block_without_an_entry(chain):
    cache, _blocks = chain
    (block,) = cache.computed([5, 5])
    cache.allocator.keep(block)
    with pytest.raises(AssertionError, match=rf"blocks \[{block}\] are either kept or an entry"):
        cache.check_integrity()


def test_integrity_of_keys_that_lead_elsewhere(chain):
    cache, (parent, child) = chain
    key = cache._entries[child].key
    cache._blocks[key] = parent
    with pytest.raises(AssertionError, match=f"block {child} is not found by its key"):
        cache.check_integrity()
    cache._blocks[key] = child
    cache._blocks[key._replace(tokens=(7, 7))] = 9
    with pytest.raises(AssertionError, match=r"keys lead to \{9\}"):
        cache.check_integrity()
