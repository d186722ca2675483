import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from deepinfer_lab.figures import comparison, style


def table() -> pd.DataFrame:
    return pd.DataFrame(
        [
            ("gemm", "time_us", "m=2", 1.5, 1.4, 1.6, True),
            ("serve", "", "itl_ms clients=1", 1.3, np.nan, np.nan, False),
            ("gemm", "time_us", "m=1", 1.0, 0.9, 1.1, False),
        ],
        columns=["experiment", "common", "label", "ratio", "low", "high", "flagged"],
    )


def drawn(rows: pd.DataFrame, tolerance: float = 0.03) -> Axes:
    _, axes = style.figure(height_in=comparison.forest_height_in(rows))
    comparison.draw_forest(axes[0, 0], rows, tolerance, "A: a\nB: b")
    return axes[0, 0]


def test_each_row_has_its_point_and_its_interval_under_its_experiment():
    axes = drawn(table())
    ticks = dict(zip((t.get_text() for t in axes.get_yticklabels()), axes.get_yticks(), strict=True))
    assert ticks == {"gemm": 0, "m=2": 1, "m=1": 2, "serve": 3, "itl_ms clients=1": 4}
    points = {line.get_ydata()[0]: line for line in axes.lines if len(line.get_xdata()) == 1}
    assert {at: line.get_xdata()[0] for at, line in points.items()} == {1: 1.5, 2: 1.0, 4: 1.3}
    assert {at: line.get_color() for at, line in points.items()} == {
        1: comparison.FLAGGED, 2: comparison.WITHIN, 4: comparison.UNSURE,
    }  # fmt: skip
    intervals = {
        line.get_ydata()[0]: tuple(line.get_xdata())
        for line in axes.lines
        if list(line.get_ydata()) in ([1, 1], [2, 2])
    }
    assert intervals == {1: (1.4, 1.6), 2: (0.9, 1.1)}
    assert axes.texts[0].get_text() == "time_us"
    bottom, top = axes.get_ylim()
    assert bottom > 4
    assert top < 0


def test_experiments_stand_out_and_the_legend_explains_the_colours():
    axes = drawn(table(), tolerance=0.05)
    bold = [t.get_text() for t in axes.get_yticklabels() if t.get_fontweight() == "bold"]
    assert bold == ["gemm", "serve"]
    (legend,) = axes.get_figure().legends
    assert legend.get_texts()[0].get_text() == "interval outside of 1 ± 5.0%"


@pytest.mark.parametrize("ratios", [(1.0, 1.0), (1.0, 1.5), (0.7, 2.0), (0.1, 9.0), (1e-3, 2.0), (0.9999, 1e6)])
def test_the_axis_shows_all_points_and_1_and_a_few_plain_numbers(ratios: tuple[float, float]):
    rows = pd.concat([table()] * 2, ignore_index=True).assign(low=np.nan, high=np.nan)
    rows["ratio"] = np.resize(ratios, len(rows))
    axes = drawn(rows)
    low, high = axes.get_xlim()
    assert low < min(*ratios, 1) <= max(*ratios, 1) < high
    axes.get_figure().canvas.draw()
    shown = [text.get_text() for text in axes.get_xticklabels() if low <= text.get_position()[0] <= high]
    assert "1" in shown
    assert 3 <= len(shown) <= 10
    assert not any("times" in text or "^" in text for text in shown)


@pytest.mark.parametrize("count", [1, 30])
def test_any_number_of_rows_fits_with_long_labels(count: int, tmp_path: Path):
    rows = pd.concat([table().head(1)] * count, ignore_index=True)
    rows["label"] = [f"{number} " + "policy=dual-stream-async " * 6 for number in range(count)]
    axes = drawn(rows)
    assert all(len(text.get_text()) < 140 for text in axes.get_yticklabels())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where axes have no room left
        style.save(axes.get_figure(), tmp_path, "forest", rows)
    assert axes.get_window_extent().height / count > 15
    assert axes.get_window_extent().width > 200
    labels = [text.get_window_extent() for text in axes.get_yticklabels()]
    assert min(box.x0 for box in labels) >= 0
    assert all(above.y0 >= below.y1 - 1 for above, below in pairwise(labels))
