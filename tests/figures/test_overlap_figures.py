"""The pictures of overlap show what their tables say."""

import numpy as np
import pandas as pd
import pytest
from drawing import axes
from matplotlib.colors import to_hex

from deepinfer_lab.figures import overlap, style


def steps() -> pd.DataFrame:
    return pd.DataFrame(
        [
            ("prefill", "prefill", 1.0, 9.0),
            ("decode", "decode", -2.0, 0.5),
            ("decode", "decode", 0.5, 3.5),
            ("decode", "mixed", 4.0, 8.0),
        ],
        columns=["lane", "phase", "started_ms", "finished_ms"],
    )


def test_every_step_is_drawn_when_and_where_it_ran():
    drawn = axes()
    overlap.draw_lanes(drawn, steps(), 10.0, "title")
    lanes = [tick.get_text() for tick in drawn.get_yticklabels()]
    assert lanes == ["decode", "prefill"]
    bars = set()
    for bar in drawn.patches:
        left, middle = bar.get_x(), bar.get_y() + bar.get_height() / 2
        bars.add((lanes[round(middle)], left, left + bar.get_width(), to_hex(bar.get_facecolor())))
    assert bars == {
        (s.lane, s.started_ms, s.finished_ms, overlap.PHASES[s.phase].lower()) for s in steps().itertuples()
    }
    assert [line.get_xdata()[0] for line in drawn.lines] == [0, 10.0]


def test_lanes_do_not_touch():
    drawn = axes()
    overlap.draw_lanes(drawn, steps(), 10.0, "title")
    ends = sorted({(bar.get_y(), bar.get_y() + bar.get_height()) for bar in drawn.patches})
    assert ends[0][1] < ends[1][0]


def test_phases_have_the_colours_of_every_other_picture():
    assert (overlap.PHASES["prefill"], overlap.PHASES["decode"]) == (style.PREFILL, style.DECODE)
    assert len(set(overlap.PHASES.values())) == len(overlap.PHASES)
    assert not set(overlap.BARS) & set(overlap.PHASES.values())
    legend = overlap.phase_legend(["decode", "mixed"])
    assert [patch.get_label() for patch in legend] == ["decode", "mixed"]


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "policy": ["b", "b", "a", "a"],
            "phase": ["prefill", "decode"] * 2,
            "times": [1.0, 1.5, 2.0, np.nan],
        }
    )


def test_bars_stand_in_the_tables_order_each_with_its_number():
    drawn = axes()
    overlap.draw_bars(drawn, table(), "policy", "times", "title", "x", series="phase", form="{:.2f}")
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["b", "a"]
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in drawn.containers}
    assert widths["prefill"] == [1.0, 2.0]
    assert widths["decode"][0] == 1.5
    colours = [to_hex(bars[0].get_facecolor()) for bars in drawn.containers]
    assert colours == [colour.lower() for colour in overlap.BARS[:2]]
    assert [text.get_text().strip() for text in drawn.texts] == ["1.00", "2.00", "1.50"]  # nothing for what is missing
    assert drawn.get_xlim()[0] == 0
    assert drawn.get_xlim()[1] > 2.0
    assert drawn.yaxis_inverted()


@pytest.mark.parametrize("values", [[0, 0], [0.0, None]])
def test_nothing_but_zeros_still_has_an_axis(values: list):
    drawn = axes()
    overlap.draw_bars(drawn, pd.DataFrame({"policy": ["a", "b"], "ms": values}), "policy", "ms", "title", "ms")
    assert drawn.get_xlim()[1] > 0
    assert drawn.texts[0].get_text().strip() == "0"
