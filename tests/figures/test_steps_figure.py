"""The picture of decode steps shows what its table says."""

import pandas as pd
from drawing import axes

from deepinfer_lab.figures.steps import COLOURS, draw_steps


def test_a_line_for_each_way_and_number_of_rows_with_its_prediction_and_the_floor_of_the_fewest():
    table = pd.DataFrame(
        [("launches", 2, 512, 30.0, 29.0, 12.0), ("launches", 2, 128, 28.0, 27.0, 11.0), ("chain", 1, 128, 20.0, 22.0, 10.0)],
        columns=["way", "rows", "context", "us", "predicted_us", "floor_us"],
    )  # fmt: skip
    drawn = axes()
    draw_steps(drawn, table, "title")
    named = {line.get_label(): line for line in drawn.lines if not line.get_label().startswith("_")}
    assert {name: line.get_xydata().tolist() for name, line in named.items()} == {
        "launches, 2 rows": [[128, 28], [512, 30]], "chain, 1 row": [[128, 20]], "memory floor": [[128, 10]],
    }  # fmt: skip
    marks = [line for line in drawn.lines if line.get_marker() == "x"]
    assert [line.get_xydata().tolist() for line in marks] == [[[128, 27], [512, 29]], [[128, 22]]]
    assert [line.get_color() for line in marks] == [COLOURS["launches"], COLOURS["chain"]]
    assert named["launches, 2 rows"].get_linestyle() != named["chain, 1 row"].get_linestyle()
    low, high = drawn.get_ylim()
    assert low == 0
    assert high > 30
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["128", "512"]
