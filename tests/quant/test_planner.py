"""Plans by budget, against every possible plan."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.errors import SettingError
from deepinfer_lab.quant.planner import Unit, plan_for


def unit(name: str, bytes3: int, bytes4: int, loss: float) -> Unit:
    return Unit((f"{name}.a", f"{name}.b"), bytes3, bytes4, loss)


def outcome(bits: list[int], units: list[Unit]) -> tuple[int, float]:
    """Bytes and summed loss of the units in these bits."""
    of_each = list(zip(bits, units, strict=True))
    return sum(u.bytes3 if b == 3 else u.bytes4 for b, u in of_each), sum(u.loss for b, u in of_each if b == 3)


SIZES = st.tuples(st.integers(0, 30), st.integers(0, 12), st.floats(-1, 10, width=16))


@given(st.lists(SIZES, min_size=1, max_size=8), st.floats(0, 1.2))
def test_no_plan_that_fits_loses_less(sizes, fraction):
    units = [unit(f"u{i}", b3, b3 + more, loss) for i, (b3, more, loss) in enumerate(sizes)]
    least, most = (sum(getattr(u, name) for u in units) for name in ("bytes3", "bytes4"))
    budget = least + int(fraction * (most - least))
    plan = plan_for(budget, units)
    assert all(plan.bits_for(f"u{i}.a") == plan.bits_for(f"u{i}.b") for i in range(len(units)))
    nbytes, loss = outcome([plan.bits_for(u.layers[0]) for u in units], units)
    everything = [outcome(list(bits), units) for bits in itertools.product((3, 4), repeat=len(units))]
    fitting = [found for found in everything if found[0] <= budget]
    assert nbytes <= budget
    assert loss == pytest.approx(min(loss for _, loss in fitting), abs=1e-9)
    assert nbytes == min(size for size, least_loss in fitting if least_loss == pytest.approx(loss, abs=1e-9))


def test_greedy_by_loss_per_byte_would_do_worse():
    """The knapsack's usual trap: a small unit is best by the byte and leaves no room for the one that matters."""
    units = [unit("small", 10, 11, 2.0), unit("large", 100, 110, 10.0)]
    assert plan_for(120, units).bits == {"small.a": 3, "small.b": 3, "large.a": 4, "large.b": 4}


def test_both_ends():
    units = [unit("a", 3, 4, 1.0), unit("b", 30, 40, 0.5), unit("same", 7, 7, 0.1), unit("better-in-w3", 3, 4, -0.2)]
    assert set(plan_for(43, units).bits.values()) == {3, 4}  # four bits that cost nothing are taken
    assert [plan_for(43, units).bits_for(f"{u}.a") for u in ("a", "b", "same", "better-in-w3")] == [3, 3, 4, 3]
    assert [plan_for(10**9, units).bits_for(f"{u}.a") for u in ("a", "b", "same", "better-in-w3")] == [4, 4, 4, 3]
    assert plan_for(10**9, units).bits_for("model.embed_tokens") is None
    assert plan_for(0, []).bits == {}


def test_a_whole_model_is_quick():
    """120 units with the sizes of SmolLM2-135M's blocks: the choices kept stay few, or this would never end."""
    sizes = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
    units = [
        Unit((f"{block}.{name}",), n * k * 3 // 8, n * k // 2, 1 / (1 + (block * 7 + n) % 31))
        for block in range(30)
        for name, (n, k) in sizes.items()
    ]
    least, most = sum(u.bytes3 for u in units), sum(u.bytes4 for u in units)
    losses = []
    for part in (0, 1, 2, 3, 4):
        budget = least + (most - least) * part // 4
        plan = plan_for(budget, units)
        nbytes, loss = outcome([plan.bits_for(u.layers[0]) for u in units], units)
        assert budget - 14_000 < nbytes <= budget  # all sizes are multiples of 13,824
        losses.append(loss)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0


@pytest.mark.parametrize(
    ("budget", "units", "said"),
    [
        (109, [unit("a", 10, 11, 1.0), unit("b", 100, 110, 1.0)], "109 bytes: all layers in W3 take 110"),
        (-1, [], "budget of -1 bytes"),
        (99, [unit("a", 1, 2, 1.0), unit("a", 1, 2, 1.0)], r"layer a\.a is in two units"),
    ],
)
def test_budgets_and_units_that_are_refused(budget, units, said):
    with pytest.raises(SettingError, match=said):
        plan_for(budget, units)


@pytest.mark.parametrize(("bytes3", "bytes4", "loss"), [(5, 4, 1.0), (-1, 4, 1.0), (3, 4, float("nan")), (3, 4, 1e999)])
def test_units_that_make_no_sense(bytes3, bytes4, loss):
    with pytest.raises(SettingError, match=rf"unit a\.a, a\.b: {bytes3} bytes in W3, {bytes4} in W4, loss {loss}"):
        unit("a", bytes3, bytes4, loss)
