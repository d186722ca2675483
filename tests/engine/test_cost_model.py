"""The cost model against machines whose costs are known."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepinfer_lab.engine.cost_model import FAR, HANDFUL, CostModel

pytestmark = pytest.mark.filterwarnings("error")  # NumPy warns of overflows and of divisions by 0

SIZES = (16, 64, 100, 128, 256, 512)


@dataclass(frozen=True)
class Machine:
    """Milliseconds for a pass, a token, and a pair of tokens."""

    a: float
    b: float
    c: float

    def prefill(self, tokens: int, start: int) -> float:
        return self.a + self.b * tokens + self.c * tokens * (start + tokens / 2)

    def decode(self, rows: int, context: int) -> float:
        return self.a + self.b * rows + self.c * context

    def times(self, factor: float) -> "Machine":
        return Machine(self.a * factor, self.b * factor, self.c * factor)


GPU = Machine(2.0, 0.01, 3e-7)
MACHINES = [GPU, Machine(300, 1.2, 2e-4), Machine(5, 1e-4, 1e-8), Machine(0.01, 0.1, 0), Machine(0.2, 0, 1e-6)]


def watch(model: CostModel, machine: Machine, count: int, noise: float = 0.0, seed: float = 0) -> None:
    """Let the model see chunks and steps of many sizes."""
    rng = random.Random(seed)
    for _ in range(count):
        tokens, start = rng.choice(SIZES), rng.randrange(8000)
        model.observe_prefill(tokens, start, machine.prefill(tokens, start) * rng.lognormvariate(0, noise))
        rows = rng.randint(1, 64)
        context = rows * rng.randint(1, 4000)
        model.observe_decode(rows, context, machine.decode(rows, context) * rng.lognormvariate(0, noise))


def worst(model: CostModel, machine: Machine) -> float:
    """The largest relative error over what was watched."""
    errors = [
        model.prefill_ms(tokens, start) / machine.prefill(tokens, start) - 1
        for tokens in SIZES
        for start in (0, 500, 4000, 8000)
    ] + [
        model.decode_ms(rows, context * rows) / machine.decode(rows, context * rows) - 1
        for rows in (1, 8, 64)
        for context in (1, 500, 4000)
    ]
    return max(map(abs, errors))


@pytest.mark.parametrize("machine", MACHINES)
def test_costs_without_noise_are_found(machine):
    model = CostModel()
    watch(model, machine, 100)
    assert worst(model, machine) < 1e-3


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(5))
def test_noise_counts_the_same_for_small_and_large(machine, seed):
    """5% of noise leaves every size, between 16 tokens and 512, with an error of that order."""
    model = CostModel()
    watch(model, machine, 300, noise=0.05, seed=seed)
    assert worst(model, machine) < 0.15


@pytest.mark.parametrize("power", [0.2, 0.5, 1.5])
def test_a_law_that_only_negative_costs_would_follow_is_met_in_the_middle(power):
    model = CostModel()
    sizes = (*SIZES, 2048)
    rng = random.Random(0)
    for _ in range(200):
        tokens = rng.choice(sizes)
        model.observe_prefill(tokens, 0, tokens**power)
    assert all(0.65 < model.prefill_ms(tokens, 0) / tokens**power < 1.5 for tokens in sizes)


@given(factor=st.floats(1e-6, 1e6), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_units_do_not_matter(factor, seed):
    ours, theirs = CostModel(), CostModel()
    watch(ours, GPU, 20, 0.1, seed)
    watch(theirs, GPU.times(factor), 20, 0.1, seed)
    assert theirs.prefill_ms(200, 300) == pytest.approx(ours.prefill_ms(200, 300) * factor, rel=1e-6)
    assert theirs.decode_ms(9, 3000) == pytest.approx(ours.decode_ms(9, 3000) * factor, rel=1e-6)


def test_nothing_is_predicted_from_too_little():
    model = CostModel()
    for count in range(HANDFUL + 3):
        assert model.wants_another_chunk_size == (count >= HANDFUL)
        model.observe_prefill(64, 64 * count, 3.0)  # more context, but what a token costs is not in it
        model.observe_decode(2, 100, 1.0)
        assert model.prefill_ms(64, 0) is model.decode_ms(2, 100) is model.prefill_tokens_within(9.0, 0, 512) is None
    model.observe_prefill(128, 0, 3.6)
    model.observe_decode(2, 102, 1.0)
    assert not model.wants_another_chunk_size
    assert model.prefill_ms(64, 0) == pytest.approx(3.0, rel=0.1)
    assert model.decode_ms(2, 100) == pytest.approx(1.0, rel=0.1)

    varied = CostModel()
    for count in range(HANDFUL):
        assert varied.prefill_ms(64, 0) is None
        varied.observe_prefill(64 + count, 0, 3.0)
    assert varied.prefill_ms(64, 0) is not None
    assert varied.decode_ms(1, 1) is None


@pytest.mark.parametrize(("factor", "passes"), [(1 / 20, 20), (1 / 3, 100), (3.0, 100), (4.9, 200), (20.0, 20)])
def test_a_machine_that_changes_at_once_is_learnt_anew(factor, passes):
    model = CostModel()
    watch(model, GPU, 300, 0.05)
    watch(model, GPU.times(factor), passes, 0.05, seed=1)
    assert worst(model, GPU.times(factor)) < 0.25


def test_a_machine_that_drifts_is_followed():
    model = CostModel()
    for step in range(200):  # to three times the cost over 1,000 passes
        machine = GPU.times(1 + step / 100)
        watch(model, machine, 5, 0.02, seed=step)
        assert step < 10 or worst(model, machine) < 0.25


@given(tokens=st.sampled_from(SIZES), start=st.integers(0, 2000))
@settings(max_examples=20, deadline=None)
def test_one_size_for_a_long_time_does_not_blur_the_others(tokens, start):
    model = CostModel()
    watch(model, GPU, 100, 0.02)
    rng = random.Random(1)
    for _ in range(1000):
        model.observe_prefill(tokens, start, GPU.prefill(tokens, start) * rng.lognormvariate(0, 0.02))
        model.observe_decode(1, 700, GPU.decode(1, 700) * rng.lognormvariate(0, 0.02))
    assert worst(model, GPU) < 0.1


@pytest.mark.parametrize("ms", [30.0, 300.0, 60_000.0])
def test_launches_that_compile_are_soon_forgotten(ms):
    model = CostModel()
    for tokens in (64, 128):
        model.observe_prefill(tokens, 0, ms)
    watch(model, GPU, HANDFUL)
    assert worst(model, GPU) < 1.0
    watch(model, GPU, 30, seed=1)
    assert worst(model, GPU) < 0.03


@pytest.mark.parametrize("factor", [0.25, 0.001, 4.0, 1000.0])
def test_one_timing_in_eight_may_be_wrong(factor):
    """As where a chunk's time is what a mixed pass took beyond the last decode step."""
    model = CostModel()
    watch(model, GPU, 50, 0.05)
    rng = random.Random(1)
    for _ in range(50):
        watch(model, GPU, 7, 0.05, seed=rng.random())
        tokens, start = rng.choice(SIZES), rng.randrange(8000)
        model.observe_prefill(tokens, start, factor * GPU.prefill(tokens, start))
        assert 0.7 < model.prefill_ms(200, 1000) / GPU.prefill(200, 1000) < 1.7


def test_an_accident_changes_nothing_and_three_are_none():
    model = CostModel()
    watch(model, GPU, 100)
    before = model.prefill_ms(200, 100)
    for _ in range(10):  # each alone, between others
        model.observe_prefill(200, 100, before * FAR * 1.01)
        for _ in range(HANDFUL):
            model.observe_prefill(200, 100, before)
    assert model.prefill_ms(200, 100) == pytest.approx(before, rel=1e-3)
    model.observe_prefill(200, 100, before * 10)
    model.observe_prefill(200, 100, before * 10)
    assert model.prefill_ms(200, 100) == pytest.approx(before, rel=1e-3)
    model.observe_prefill(200, 100, before * 10)
    assert model.prefill_ms(200, 100) is None  # it starts again
    watch(model, GPU.times(10), 30)
    assert worst(model, GPU.times(10)) < 0.05


def test_a_kind_of_work_unlike_the_rest_is_believed_though_the_rest_goes_on():
    """Two prompts in turn: short contexts, where attention costs nothing, and one of 100,000 tokens."""
    machine = Machine(1.0, 1e-3, 2e-6)
    model = CostModel()
    for count in range(200):
        model.observe_prefill(16 + count % 7, 0, machine.prefill(16 + count % 7, 0))
    for count in range(30):
        model.observe_prefill(16 + count % 7, 0, machine.prefill(16 + count % 7, 0))
        model.observe_prefill(256, 100_000, machine.prefill(256, 100_000))
    assert model.prefill_ms(256, 100_000) == pytest.approx(machine.prefill(256, 100_000), rel=0.05)
    assert model.prefill_ms(16, 0) == pytest.approx(machine.prefill(16, 0), rel=0.05)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_says_nothing_is_not_heard(ms):
    model = CostModel()
    for _ in range(3):
        model.observe_prefill(64, 0, ms)
        model.observe_decode(1, 1, ms)
    watch(model, GPU, 30)
    for _ in range(30):
        model.observe_prefill(64, 0, ms)
        model.observe_decode(1, 1, ms)
    assert worst(model, GPU) < 0.01


TIMES = st.floats(-5, 8).map(lambda exponent: 10**exponent)
PREFILLS = st.tuples(st.integers(1, 2048), st.integers(0, 100_000), TIMES)
DECODES = st.tuples(st.integers(1, 256), st.integers(1, 100_000), TIMES)


@given(
    st.lists(PREFILLS, min_size=HANDFUL, max_size=60),
    st.integers(1, 4096),
    st.integers(0, 100_000),
    st.integers(0, 999),
)
def test_more_prefill_is_never_predicted_to_take_less(observations, tokens, start, more):
    """Whatever was observed, be it nonsense."""
    model = CostModel()
    for observation in observations:
        model.observe_prefill(*observation)
    here = model.prefill_ms(tokens, start)
    assume(here is not None)
    assert 0 < here <= model.prefill_ms(tokens + more, start) * (1 + 1e-12) < float("inf")
    assert here <= model.prefill_ms(tokens, start + more) * (1 + 1e-12)


@given(
    st.lists(DECODES, min_size=HANDFUL, max_size=60), st.integers(1, 256), st.integers(1, 100_000), st.integers(0, 999)
)
def test_more_decode_is_never_predicted_to_take_less(observations, rows, context, more):
    model = CostModel()
    for observation in observations:
        model.observe_decode(*observation)
    here = model.decode_ms(rows, context)
    assume(here is not None)
    assert 0 < here <= model.decode_ms(rows + more, context) * (1 + 1e-12) < float("inf")
    assert here <= model.decode_ms(rows, context + more) * (1 + 1e-12)


@given(
    st.lists(PREFILLS, min_size=HANDFUL, max_size=20),
    st.floats(-100, 1e5),
    st.integers(0, 100_000),
    st.integers(1, 4096),
    st.sampled_from([1, 16, 64, 100]),
)
def test_the_largest_chunk_that_fits_and_no_larger(observations, ms, start, most, granule):
    model = CostModel()
    for observation in observations:
        model.observe_prefill(*observation)
    chunk = model.prefill_tokens_within(ms, start, most, granule)
    assume(chunk is not None)
    assert chunk == most or (chunk < most and chunk % granule == 0)
    assert chunk >= min(granule, most)
    if chunk > granule:
        assert model.prefill_ms(chunk, start) <= ms * (1 + 1e-9)
    if chunk < most:
        assert model.prefill_ms(min(chunk + granule, most), start) > ms * (1 - 1e-9)


def test_a_chunk_shrinks_as_the_prompt_grows():
    machine = Machine(1.0, 0.01, 1e-5)
    model = CostModel()
    watch(model, machine, 100)
    chunks = [model.prefill_tokens_within(10.0, start, 2048) for start in range(0, 100_000, 1000)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == 640  # 1 + 6.4 + 2.05 ms; 704 tokens would take 10.52 ms
    assert chunks[-1] == 64
