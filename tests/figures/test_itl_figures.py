"""The pictures of gaps between tokens show what their tables say, and the front is the set of rows that nobody beats."""

import numpy as np
import pandas as pd
import pytest
from drawing import axes, texts
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from deepinfer_lab.engine.policy import POLICIES
from deepinfer_lab.figures import itl, style


def test_every_policy_has_a_look_of_its_own():
    assert set(itl.LOOKS) == set(POLICIES)
    colours, markers = zip(*itl.LOOKS.values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(POLICIES)
    assert style.PUBLISHED not in colours


points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@given(points)
def test_front_is_what_nobody_beats(rows: list[tuple[int, int]]):
    table = pd.DataFrame(rows, columns=["x", "y"], index=range(10, 10 + len(rows)))
    kept = itl.front(table, "x", "y")
    for (x, y), stays in zip(rows, kept, strict=True):
        beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in rows)
        assert stays == (not beaten)
    assert kept.any()
    assert kept.index.equals(table.index)


def test_rows_without_numbers_beat_nobody():
    table = pd.DataFrame({"x": [np.nan, 1.0, 2.0], "y": [np.nan, 1.0, 2.0]})
    assert itl.front(table, "x", "y").tolist()[1:] == [True, False]


def test_ecdf_table_keeps_the_order_of_groups_and_sorts_gaps():
    gaps = pd.DataFrame({"policy": ["serial", "mixed", "priority"], "gaps": [[3.0, 1.0, 2.0, 2.0], [5.0], []]})
    table = itl.ecdf_table(gaps, "policy", "gaps")
    assert table.to_dict("list") == {
        "policy": ["serial"] * 4 + ["mixed"], "itl_ms": [1, 2, 2, 3, 5], "share": [0.25, 0.5, 0.75, 1, 1],
    }  # fmt: skip
    drawn = axes()
    itl.draw_ecdf(drawn, table, "mixed")
    assert [line.get_xydata().tolist() for line in drawn.lines] == [[[1, 0.25], [2, 0.5], [2, 0.75], [3, 1]], [[5, 1]]]
    other, its = (to_hex(line.get_color()) for line in drawn.lines)
    assert its == itl.LOOKS["mixed"][0].lower()
    assert other not in {colour.lower() for colour, _ in itl.LOOKS.values()}
    assert drawn.get_title(loc="left") == "mixed"
    assert drawn.get_xscale() == "log"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.sampled_from([0.01, 0.05, 0.3]))
def test_labels_keep_their_order_and_distance(wanted: list[float], least: float):
    placed = itl.apart(wanted, least)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(placed[order]) >= least - 1e-9).all()
    assert placed.mean() == pytest.approx(np.mean(wanted))  # a block is centred on what its members want
    if (np.diff(np.sort(wanted)) >= least).all():
        assert placed.tolist() == wanted


def test_traces_have_a_tick_for_every_token_and_count_those_that_come_at_once():
    table = pd.DataFrame(
        {"trace": ["b"] * 3 + ["a"], "token": [0, 1, 2, 0], "at_ms": [10.0, 40.0, 40.0, 20.0]}
    )  # fmt: skip
    drawn = axes()
    itl.draw_traces(drawn, table)
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["b", "a"]
    assert [line.get_xdata().tolist() for line in drawn.lines] == [[10, 40, 40], [20]]
    assert texts(drawn) == ["2"]
    assert [(bar.get_x(), bar.get_width()) for bar in drawn.patches] == [(0, 10), (10, 30), (0, 20), (20, 0)]


def test_a_reader_is_drawn_by_its_gaps():
    drawn = axes()
    itl.draw_reader(drawn, [-5.0, 0.0, 12.0, 15.0], 9.0, 3.0, "title")
    window, gaps = drawn.patches
    assert (window.get_x(), window.get_width()) == (0, 9)
    assert gaps.get_data().values.tolist() == [5, 12, 3]
    assert gaps.get_data().edges.tolist() == [-5, 0, 12, 15]
    assert drawn.lines[0].get_ydata() == [3, 3]


def costs() -> pd.DataFrame:
    return pd.DataFrame(
        [
            ("serial", 512, 100.0, 8.0),
            ("serial", 128, 200.0, 4.0),
            ("mixed", 128, 90.0, 9.0),
            ("mixed", 512, 150.0, 9.0),
            ("another engine", 2048, 50.0, 1.0),
            ("another engine", 512, 60.0, 0.5),
        ],
        columns=["source", "chunk", "ttft", "gap"],
    )


def test_pareto_draws_a_line_a_policy_and_the_front_of_policies_alone():
    drawn = axes()
    itl.draw_pareto(drawn, costs(), "ttft", "gap", "title", "x (ms)", "y (ms)")
    lines = [line.get_xydata().tolist() for line in drawn.lines]
    assert lines[:2] == [[[200, 4], [100, 8]], [[90, 9], [150, 9]]]  # by chunk
    assert lines[2] == [[60, 0.5], [50, 1]]
    assert to_hex(drawn.lines[2].get_color()) == style.PUBLISHED
    assert lines[3] == [[90, 9], [100, 8], [200, 4]]
    small, large = drawn.collections[0].get_sizes()
    assert small < large
    assert (drawn.get_xscale(), drawn.get_yscale()) == ("log", "log")


def test_names_point_at_the_right_ends_of_their_lines():
    drawn = axes()
    itl.draw_pareto(drawn, costs(), "ttft", "gap", "title", "x (ms)", "y (ms)")
    assert texts(drawn) == ["512", "2,048", "serial", "mixed", "another engine"]
    assert {text.get_text(): tuple(text.xy) for text in drawn.texts[2:]} == {
        "serial": (200, 4), "mixed": (150, 9), "another engine": (60, 0.5),
    }  # fmt: skip


def test_grid_puts_every_number_in_its_cell_whatever_the_order_of_rows():
    rows = [(c, f, c + f) for c in (128, 512, 1024) for f in (1, 4)]
    table = pd.DataFrame(rows, columns=["chunk", "max_in_flight", "value"]).sample(frac=1, random_state=3)
    drawn = axes()
    itl.draw_grid(drawn, table, "value", "title")
    assert drawn.images[0].get_array().tolist() == [[129, 132], [513, 516], [1025, 1028]]
    assert texts(drawn) == ["129", "132", "513", "516", "1025", "1028"]
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["128", "512", "1024"]
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["1", "4"]
    dark, light = drawn.texts[-1].get_color(), drawn.texts[0].get_color()
    assert (light, dark) == ("black", "white")


def test_a_cell_that_was_not_measured_stays_empty():
    table = pd.DataFrame([(128, 1, 1.0), (128, 4, 2.0), (512, 1, 3.0)], columns=["chunk", "max_in_flight", "value"])
    drawn = axes()
    itl.draw_grid(drawn, table, "value", "title")
    assert texts(drawn) == ["1", "2", "3"]
