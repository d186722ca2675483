"""The pictures of quantisation quality show what their tables say."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from drawing import axes

from deepinfer_lab.figures import quality


def points() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "series": ["rtn"] * 3 + ["gptq"] * 3 + ["planned"],
            "bits": ["w4", "mixed", "w3"] * 2 + ["planned-0.5"],
            "mb": [56.0, 46.0, 43.0, 56.0, 46.0, 43.0, 50.0],
            "perplexity": [17.0, 28.0, 50.0, 13.9, 15.5, 16.5, 14.5],
        }
    )


def test_pareto_has_a_line_for_every_series_and_rings_the_articles_plan():
    drawn = axes()
    quality.draw_pareto(drawn, points(), 13.1)
    lines = {line.get_label(): line for line in drawn.lines}
    assert list(lines)[:3] == ["rtn", "gptq", "planned"]
    assert lines["rtn"].get_xydata().tolist() == [[43, 50], [46, 28], [56, 17]]
    assert lines["planned"].get_xydata().tolist() == [[50, 14.5]]
    assert lines["unquantised: 13.1"].get_ydata() == [13.1, 13.1]
    ring = lines["the article's plan: MLP 3 bits, attention 4"]
    assert ring.get_xydata().tolist() == [[46, 28], [46, 15.5]]
    assert ring.get_fillstyle() == "none"
    looks = {(lines[name].get_color(), lines[name].get_marker()) for name in ("rtn", "gptq", "planned")}
    assert len(looks) == 3
    assert drawn.get_yscale() == "log"
    assert drawn.get_ylim()[0] < 13.1


def test_as_many_series_as_there_are_markers_look_different():
    names = [f"s{i}" for i in range(len(quality.MARKERS))]
    table = pd.DataFrame({"series": names, "bits": "w4", "mb": 1.0, "perplexity": 2.0})
    drawn = axes()
    quality.draw_pareto(drawn, table, 1.0)
    assert [line.get_label() for line in drawn.lines][: len(names)] == names
    assert len({(line.get_color(), line.get_marker()) for line in drawn.lines[: len(names)]}) == len(names)


def test_sensitivity_puts_every_value_in_its_place_whatever_the_order_of_rows():
    units = ["qkv", "o", "gate_up", "down"]
    table = pd.DataFrame(
        [{"block": b, "unit": u, "kl": 10.0 ** -(b + i)} for b in range(5) for i, u in enumerate(units)]
    )
    shuffled = pd.concat([table[:4], table[4:].sample(frac=1, random_state=1)])
    drawn = axes()
    quality.draw_sensitivity(drawn, shuffled, "kl", "title", "KL (nats)")
    mesh = drawn.collections[0]
    expected = [[10.0 ** -(b + i) for b in range(5)] for i in range(4)]
    assert np.array_equal(mesh.get_array().reshape(4, 5), expected)
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == units
    assert drawn.yaxis_inverted()
    assert isinstance(mesh.norm, mpl.colors.LogNorm)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (1e-7, 1.0)
    assert mesh.colorbar.ax.get_ylabel() == "KL (nats)"
    assert drawn.get_xlim() == (-0.5, 4.5)
