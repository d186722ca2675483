"""The pictures of rooflines and loads show what their tables say."""

import numpy as np
import pandas as pd
from drawing import axes

from deepinfer_lab.figures import capacity, roofline


def test_a_roof_bends_at_its_ridge():
    drawn = axes()
    roofline.draw_roof(drawn, 2e12, 100e12, (1, 1000), "roof")
    (line,) = drawn.lines
    assert line.get_xydata().tolist() == [[1, 2], [50, 100], [1000, 100]]


def test_points_with_names_are_not_joined():
    table = pd.DataFrame(
        [("by clients", 1, 2.0, 3.0), ("by clients", 4, 8.0, 9.0), ("models", "3B", 5.0, 6.0)],
        columns=["series", "name", "intensity", "tflops"],
    )
    drawn = axes()
    roofline.draw_points(drawn, table, "title")
    assert [line.get_linestyle() for line in drawn.lines] == ["-", "None"]
    assert drawn.lines[0].get_xydata().tolist() == [[2, 3], [8, 9]]
    assert [text.get_text() for text in drawn.texts] == ["1", "4", "3B"]
    assert (drawn.get_xscale(), drawn.get_yscale()) == ("log", "log")


def test_parts_follow_each_other_from_zero():
    table = pd.DataFrame({"name": ["a", "b"], "x": [1.0, 2.0], "y": [3.0, 0.5]})
    drawn = axes()
    roofline.draw_parts(
        drawn, table, {"x": "#111111", "y": "#222222"}, "t", "ms", form="{:.1f}", limit=(4, "the limit")
    )
    spans = [(bar.get_x(), bar.get_width()) for bar in drawn.patches]
    assert spans == [(0, 1), (0, 2), (1, 3), (2, 0.5)]
    assert [text.get_text() for text in drawn.texts] == ["4.0", "2.5"]
    assert drawn.lines[0].get_xdata()[0] == 4
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["a", "b"]


def test_requests_in_system_are_steps():
    table = pd.DataFrame({"series": "a", "at_s": [0.0, 1.0, 3.0], "count": [1, 2, 0]})
    drawn = axes()
    capacity.draw_in_system(drawn, table, "title")
    (line,) = drawn.lines
    assert line.get_drawstyle() == "steps-post"
    assert np.array_equal(line.get_xydata(), [[0, 1], [1, 2], [3, 0]])


def test_loops_are_named_where_there_are_several():
    table = pd.DataFrame(
        [("serial", "closed", 1, 2), ("serial", "poisson", 1, 3), ("mixed", "closed", 1, 4)],
        columns=["policy", "loop", "x", "y"],
    )
    drawn = axes()
    capacity.draw_load(drawn, table, "x", "y", "title", "x", "y")
    names = [line.get_label() for line in drawn.lines]
    assert names == ["serial, closed", "serial, poisson", "mixed, closed"]
    assert len({line.get_linestyle() for line in drawn.lines[:2]}) == 2
