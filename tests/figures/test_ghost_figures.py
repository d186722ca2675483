"""The pictures of the ghost reply show what their tables say."""

import pandas as pd
import pytest
from drawing import axes
from matplotlib.colors import to_hex

from deepinfer_lab.figures import ghost


def race(owner: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "moment": ["before", "after"],
            "states": [["free", "readonly"], ["pending", "writing"]],
            "owners": [["", "A"], ["A", owner]],
            "written": [None, 1],
        }
    )


def test_block_table_has_a_row_for_each_block_at_each_moment():
    table = ghost.block_table(race("B"))
    assert table[["step", "block", "state", "owner", "written"]].to_numpy().tolist() == [
        [0, 0, "free", "", False],
        [0, 1, "readonly", "A", False],
        [1, 0, "pending", "A", False],
        [1, 1, "writing", "B", True],
    ]


@pytest.mark.parametrize(("owner", "colour"), [("B", ghost.GHOST), ("A", "#000000")])
def test_blocks_have_the_colour_of_their_state_and_harm_is_framed(owner: str, colour: str):
    drawn = axes()
    ghost.draw_blocks(drawn, ghost.block_table(race(owner)), "title")
    fills = [to_hex(p.get_facecolor()) for p in drawn.patches if p.get_fill()]
    expected = [ghost.STATE_COLOURS[state] for state in ("free", "readonly", "pending", "writing")]
    assert fills == [to_hex(colour) for colour in expected]
    frames = [p for p in drawn.patches if not p.get_fill()]
    assert [to_hex(frame.get_edgecolor()) for frame in frames] == [colour.lower()]
    assert (int(frames[0].get_x()), int(frames[0].get_y())) == (1, 1)
    assert [text.get_text() for text in drawn.texts] == ["", "A", "A", owner]
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["before", "after"]
    assert drawn.yaxis_inverted()


def test_the_legend_names_every_state():
    drawn = axes()
    ghost.block_legend(drawn)
    names = [text.get_text() for text in drawn.get_legend().get_texts()]
    assert names == [*ghost.STATE_COLOURS, "A's step writes", "into a block of B's"]


def test_outcomes_carry_their_numbers():
    drawn = axes()
    ghost.draw_outcomes(drawn, pd.DataFrame({"late_percent": [0, 90], "early": [0, 283], "wrong": [0, 4]}))
    assert [bar.get_height() for bar in drawn.patches] == [0, 283, 0, 4]
    assert {"283", "4"} <= {text.get_text() for text in drawn.texts}
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["0%", "90%"]


def test_the_pool_is_always_full_of_something():
    table = pd.DataFrame(
        {"turn": [0, 1, 2], "writing": [1, 2, 0], "readonly": [0, 1, 1], "pending": [0, 1, 2], "free": [3, 0, 1]}
    )
    drawn = axes()
    ghost.draw_pool(drawn, table, "title")
    assert len(drawn.collections) == 4
    assert drawn.get_ylim() == (0, 4)
    top = drawn.collections[-1].get_paths()[0].vertices[:, 1]
    assert top.max() == 4


def test_lateness_has_a_dot_at_each_median_and_a_line_at_the_step():
    table = pd.DataFrame(
        {"way": ["asks", "is called back"], "called_back": [False, True],
         "p5": [0.01, 5.0], "p50": [0.1, 5.2], "p95": [0.4, 6.0]}
    )  # fmt: skip
    drawn = axes()
    ghost.draw_lateness(drawn, table, 3.0)
    dots = [line for line in drawn.lines if line.get_marker() == "o"]
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == [(0.1, 0), (5.2, 1)]
    assert len({dot.get_color() for dot in dots}) == 2
    assert any(list(line.get_xdata()) == [3.0, 3.0] for line in drawn.lines)
    assert drawn.get_xscale() == "log"
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["asks", "is called back"]
