"""The experiment of the ghost reply: the broken allocator does harm, the real one never, and both meet the same dice."""

import sys

import pytest

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.blocks import BlockAllocator
from deepinfer_lab.lab.completion import completion_rows
from deepinfer_lab.lab.ghost_reply import GHOST_REPLY, interleaving_rows, race_rows, text_rows
from deepinfer_lab.lab.ghost_stage import ALLOCATORS, Hasty, alone, made_up, small_model
from deepinfer_lab.lab.record import check_row

BROKEN, REAL = ALLOCATORS
GHOSTLY = 7  # a seed that gives a ghost reply at 75%


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def race(model):
    rows = list(race_rows(model))
    for row in rows:
        check_row(row, "row")
    return rows


def moments(race, allocator):
    return [row for row in race if row["row"] == "race" and row["allocator"] == allocator]


def test_the_race_ends_in_another_reply_only_without_pending(race):
    replies = {row["allocator"]: row["tokens"] for row in race if row["row"] == "reply"}
    assert replies[REAL] == replies["alone"] != replies[BROKEN]
    assert replies[BROKEN][0] == replies["alone"][0]  # it was computed before A wrote
    assert len(replies[BROKEN]) == len(replies["alone"])


def test_the_race_shows_who_owns_the_block_that_is_written(race):
    written = {
        name: [(row["owners"][3], row["states"][3]) for row in moments(race, name) if row["written"] is not None]
        for name in ALLOCATORS
    }
    assert written == {BROKEN: [("B", "writing")], REAL: [("A", "pending")]}


def test_both_races_are_one_until_the_cancel(race):
    first, second = (
        [{**row, "allocator": None} for row in moments(race, name) if row["owners"].count("B") == 0][:3]
        for name in ALLOCATORS
    )
    assert first == second
    assert first[-1]["states"] == ["pending"] * 4


class Unfinished:
    passed = False

    def query(self):
        return self.passed


def test_hasty_counts_only_what_it_hands_out_before_its_fence():
    hasty, fence = Hasty(3), Unfinished()
    hasty.release(hasty.allocate(2), [fence])
    hasty.reclaim()
    assert hasty.allocate(1) == [2]  # never released
    assert (hasty.early, hasty.allocate(1), hasty.early) == (0, [0], 1)
    fence.passed = True
    assert (hasty.allocate(1), hasty.early) == ([1], 1)
    real = BlockAllocator(1)
    real.release(real.allocate(1), [Unfinished()])
    real.reclaim()
    assert real.allocate(1) is None


@pytest.fixture(scope="module")
def interleavings(model):
    params = {**GHOST_REPLY.defaults, "seeds": 6, "late_percent": [0, 90], "drawn_late_percent": 90}
    rows = list(interleaving_rows(model, params))
    for row in rows:
        check_row(row, "row")
    return [row for row in rows if row["row"] == "interleaving"], [row for row in rows if row["row"] == "pool"]


def test_the_real_allocator_gives_no_wrong_reply_and_hands_out_no_block_early(interleavings):
    runs, _ = interleavings
    real = [row for row in runs if row["allocator"] == REAL]
    assert len(real) == 12
    assert sum(row["replies"] for row in real) > 50
    assert {(row["wrong"], row["early"]) for row in real} == {(0, 0)}


def test_the_broken_one_hands_out_blocks_early_where_lanes_are_late(interleavings):
    runs, _ = interleavings
    late = [row for row in runs if row["allocator"] == BROKEN and row["late_percent"] == 90]
    assert sum(row["early"] for row in late) > 0


def test_no_block_is_lost_in_any_turn(interleavings):
    _, pools = interleavings
    assert {pool["allocator"] for pool in pools} == {BROKEN, REAL}
    for pool in pools:
        turns = zip(pool["free"], pool["writing"], pool["readonly"], pool["pending"], strict=True)
        assert {sum(counts) for counts in turns} == {GHOST_REPLY.defaults["blocks"]}


def test_an_interleaving_is_the_same_every_time(model, interleavings):
    params = {**GHOST_REPLY.defaults, "seeds": 1, "late_percent": [90]}
    again = [row for row in interleaving_rows(model, params) if row["row"] == "interleaving"]
    assert again == [row for row in interleavings[0] if row["seed"] == 0 and row["late_percent"] == 90]


def test_a_known_interleaving_gives_a_ghost_reply(model):
    """It takes a thousand requests on average; this seed has one."""
    params = {**GHOST_REPLY.defaults, "seeds": GHOSTLY + 1, "late_percent": [75]}
    rows = [row for row in interleaving_rows(model, params) if row["row"] == "interleaving"]
    assert {(row["allocator"], row["wrong"] > 0) for row in rows if row["seed"] == GHOSTLY} == {
        (BROKEN, True),
        (REAL, False),
    }


def test_alone_knows_the_end_of_a_sequence(model):
    request = made_up("any", 7, 8)
    tokens = alone(model, request)
    assert len(tokens) == 8
    assert alone(model, request, eos=[tokens[2]]) == tokens[: tokens.index(tokens[2]) + 1]


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(SettingError, match="'synthetic:tiny' has no tokenizer"):
        next(text_rows({**GHOST_REPLY.defaults, "model": "synthetic:tiny"}))


def test_completion_rows_put_the_switch_interval_back():
    before = sys.getswitchinterval()
    rows = list(completion_rows({**GHOST_REPLY.defaults, "steps": 6, "step_ms": 1.0, "switch_ms": [5.0, 0.2]}))
    assert sys.getswitchinterval() == before
    for row in rows:
        check_row(row, "row")
        assert len(row["late_ms"]) == 6
        assert min(row["late_ms"]) >= 0
        assert row["total_s"] >= 6e-3  # the stream runs one piece at a time
    assert [row["way"] for row in rows].count("is called back") == 4
