"""Sizers on a machine of known cost, where one cycle runs a decode step and then a chunk."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.engine.cost_model import HANDFUL
from deepinfer_lab.engine.sizer import (
    Adaptive,
    DecodeAware,
    Fixed,
    MillisecondBudget,
    Outlook,
    Sizer,
)
from deepinfer_lab.errors import SettingError

ROWS = 8
CHUNK, PROMPT = 1024, 8192


@dataclass
class Machine:
    """A cycle takes a decode step of about 3 ms and a chunk of 1 + 0.02 ms a token and more behind a long context.

    Attributes:
        slowdown: of everything. beside: by how much both phases hold each other up, which their own timings do not show.
    """

    slowdown: float = 1.0
    beside: float = 1.0
    noise: float = 0.03

    def run(self, sizer: Sizer, cycles: int, seed: int = 0) -> list[tuple[int, float]]:
        """Prompt after prompt, while others decode all the time. Of each cycle the chunk and the gap."""
        rng = random.Random(seed)
        start, context, seen = 0, ROWS * 100, []
        for _ in range(cycles):
            tokens = min(sizer.tokens(Outlook(CHUNK, ROWS, context, start)), PROMPT - start)
            decode = self.slowdown * (2.6 + 0.02 * ROWS + 1e-4 * context) * rng.lognormvariate(0, self.noise)
            sizer.observe_decode(ROWS, context, decode)
            gap = decode
            if tokens:
                prefill = self.slowdown * (1 + 0.02 * tokens + 1e-6 * tokens * (start + tokens / 2))
                prefill *= rng.lognormvariate(0, self.noise)
                sizer.observe_prefill(tokens, start, prefill)
                gap = (decode + prefill) * self.beside
            sizer.observe_gap(gap)
            seen.append((tokens, gap))
            start = (start + tokens) % PROMPT
            context = ROWS * 100 + (context + ROWS) % 4000
        return seen


def share(values: list[bool]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    "sizer",
    [Fixed(), DecodeAware(), MillisecondBudget(15.0), Adaptive(15.0)],
    ids=lambda sizer: sizer.name,
)
def test_the_configured_chunk_while_nobody_decodes(sizer):
    for cycle in range(10):
        assert sizer.tokens(Outlook(300, 0, 0, 300 * cycle)) == 300
    Machine().run(sizer, 50)
    for cycle in range(10):
        assert sizer.tokens(Outlook(300, 0, 0, 300 * cycle)) == 300


OUTLOOKS = st.builds(Outlook, st.integers(1, 4096), st.integers(1, 64), st.integers(64, 10**6), st.integers(0, 10**5))


@given(
    outlooks=st.lists(OUTLOOKS, min_size=1, max_size=30),
    target=st.floats(1e-3, 1e6),
    timings=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=30, max_size=30),
)
def test_a_prompt_always_gets_on_and_no_chunk_is_too_large(outlooks, target, timings):
    """Whatever the clock says."""
    for sizer in (Fixed(), DecodeAware(50), MillisecondBudget(target), Adaptive(target)):
        for outlook, (prefill, decode, gap) in zip(outlooks, timings, strict=False):
            tokens = sizer.tokens(outlook)
            assert 1 <= tokens <= outlook.chunk_tokens
            sizer.observe_prefill(tokens, outlook.start, prefill)
            sizer.observe_decode(outlook.decoding, outlook.decode_context, decode)
            sizer.observe_gap(gap)


def test_decode_aware():
    assert DecodeAware().tokens(Outlook(512, 1, 10, 0)) == 128
    assert DecodeAware(100).tokens(Outlook(512, 40, 10, 700)) == 100
    assert DecodeAware(100).tokens(Outlook(64, 1, 10, 0)) == 64


def test_granules_until_something_is_known_and_then_two_sizes():
    sizer = MillisecondBudget(1000.0)
    outlook = Outlook(512, 1, 100, 0)
    for _ in range(HANDFUL):
        assert sizer.tokens(outlook) == 64
        sizer.observe_prefill(64, 0, 2.0)
    assert sizer.tokens(outlook) == 128  # else it would see nothing but 64 for ever
    assert sizer.tokens(outlook._replace(chunk_tokens=100)) == 100
    sizer.observe_prefill(128, 0, 3.0)
    assert sizer.tokens(outlook) == 64  # the decode step is unknown
    for context in range(100, 100 + HANDFUL):
        sizer.observe_decode(1, context, 5.0)
    assert sizer.tokens(outlook) == 512
    assert MillisecondBudget(0.001, sizer.model).tokens(outlook) == 64


def test_the_budget_is_held_and_used():
    """15 ms: 3 to 4 for the decode step, so about 500 tokens at the beginning of a prompt, and fewer at its end."""
    seen = Machine().run(MillisecondBudget(15.0), 400)[30:]
    assert share([gap <= 15.0 * 1.1 for _, gap in seen]) > 0.98
    assert share([gap >= 15.0 * 0.8 for _, gap in seen]) > 0.7  # prompts end with less than a whole chunk
    assert 300 < max(tokens for tokens, _ in seen) < 640
    fixed = Machine().run(Fixed(), 400)
    assert share([gap > 15.0 * 1.1 for _, gap in fixed]) > 0.9  # the target means something


@pytest.mark.parametrize("slowdown", [0.5, 2.0, 10.0])
def test_the_budget_is_held_again_after_the_machine_has_changed(slowdown):
    sizer = MillisecondBudget(15.0)
    Machine().run(sizer, 200)
    seen = Machine(slowdown).run(sizer, 300, seed=1)[60:]
    floor = 1.2 * slowdown * (4 + 1 + 0.02 * 64 + 1e-6 * 64 * PROMPT)  # a granule, however long it takes
    assert share([gap <= max(15.0 * 1.1, floor) for _, gap in seen]) > 0.97


@given(st.floats(0.5, 100), st.floats(1, 3), st.integers(1, 64), st.integers(64, 10**5), st.integers(0, 10**4))
@settings(max_examples=30, deadline=None)
def test_a_larger_target_never_means_a_smaller_chunk(target, more, rows, context, start):
    sizer = MillisecondBudget(target)
    Machine().run(sizer, 60)
    outlook = Outlook(CHUNK, rows, context, start)
    tokens = sizer.tokens(outlook)
    assert tokens <= MillisecondBudget(target * more, sizer.model).tokens(outlook)
    assert tokens >= sizer.tokens(outlook._replace(decoding=rows + 8))
    assert tokens >= sizer.tokens(outlook._replace(decode_context=2 * context))
    assert tokens >= sizer.tokens(outlook._replace(start=2 * start))


def test_adaptive_gives_way_where_the_timings_do_not_tell():
    """Both phases hold each other up by half, and what each took alone is all that the model sees."""
    machine = Machine(beside=1.5)
    misled = machine.run(MillisecondBudget(20.0), 600)[300:]
    adapted = machine.run(Adaptive(20.0), 600)[300:]
    assert share([gap > 20.0 for _, gap in misled]) > 0.7
    assert share([gap > 20.0 for _, gap in adapted]) < 0.2
    assert sum(gap for _, gap in adapted) / len(adapted) > 0.6 * 20.0  # and it gives away no more than it must


def test_adaptive_by_hand():
    sizer = Adaptive(10.0)
    sizer.observe_gap(10.0)
    assert sizer.scale == 1.0
    sizer.observe_gap(10.1)
    assert not sizer.spreads  # one alone is no reason
    sizer.observe_gap(10.1)
    assert sizer.spreads  # first, decode takes more of the device
    assert sizer.scale == 1.0
    sizer.observe_gap(10.1)
    assert sizer.scale == pytest.approx(0.7)
    sizer.observe_gap(8.0)
    sizer.observe_gap(10.0)  # near the target: as it should be
    assert sizer.scale == pytest.approx(0.7)
    sizer.observe_gap(7.9)
    assert sizer.scale == pytest.approx(0.72)
    for _ in range(61):  # and three before
        assert sizer.spreads
        sizer.observe_gap(1.0)
    assert not sizer.spreads
    assert sizer.scale == 1.0
    for _ in range(50):
        sizer.observe_gap(1000.0)
    assert sizer.scale == 0.1


def test_what_they_learn_is_their_own():
    first, second = MillisecondBudget(15.0), MillisecondBudget(15.0)
    Machine().run(first, 50)
    assert second.tokens(Outlook(CHUNK, ROWS, 100, 0)) == 64 < first.tokens(Outlook(CHUNK, ROWS, 100, 0))


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [MillisecondBudget, Adaptive])
def test_targets_that_are_refused(kind, target):
    with pytest.raises(SettingError, match=rf"target_ms = {target}: allowed are finite numbers above 0"):
        kind(target)


def test_sizes_that_are_refused():
    with pytest.raises(SettingError, match="busy_tokens = 0: allowed is 1 or more"):
        DecodeAware(0)
