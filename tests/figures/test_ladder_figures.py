"""The pictures of the ladder and of tiles show what their tables say, and the tiles' table what re-packing does."""

import numpy as np
import pandas as pd
import pytest
import torch
from drawing import axes, texts

from deepinfer_lab.figures import ladder, tiles
from deepinfer_lab.figures.kernels import look
from deepinfer_lab.lab.kernel_ladder import rungs
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles


def test_a_rung_is_a_bar_to_its_time_with_a_mark_at_what_was_predicted():
    table = pd.DataFrame(
        {
            "kernel": ["w4_gemv", "cublas_fp16"],
            "us": [22.0, 1234.0],
            "predicted_us": [12.0, 30.0],
            "floor_us": [8.0, 31.0],
        }
    )
    drawn = axes()
    ladder.draw_ladder(drawn, table, "title")
    assert [bar.get_x() + bar.get_width() for bar in drawn.patches] == pytest.approx([22, 1234])
    marks = [line.get_xdata()[0] for line in drawn.lines if line.get_color() == "black"]
    assert marks == [12, 30]
    assert drawn.lines[-1].get_xdata()[0] == 8
    assert texts(drawn) == ["22.0", "1,234"]
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["gemv", "cublas_fp16"]
    low, high = drawn.get_xlim()
    assert low < 8
    assert high > 1234


def test_every_rung_has_a_look():
    assert all(look(name) for bits in (3, 4, 16) for m in (1, 16) for name in rungs(bits, m))


def test_series_are_lines_over_m_and_what_is_missing_is_left_out():
    table = pd.DataFrame(
        {"m": [64, 1, 1, 64, 1], "series": ["ours", "ours", "best peer", "best peer", "cuBLAS fp16"],
         "us": [9.0, 4.0, 6.0, np.nan, np.nan]}
    )  # fmt: skip
    drawn = axes()
    ladder.draw_against(drawn, table, "title")
    lines = {line.get_label(): line.get_xydata().tolist() for line in drawn.lines}
    assert lines == {"ours": [[1, 4], [64, 9]], "best peer": [[1, 6]]}
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["1", "4", "16", "64"]


@pytest.mark.parametrize("bits", [4, 3])
def test_every_bit_of_a_unit_is_where_the_table_says(bits: int):
    table = tiles.unit_table(bits)
    assert len(table) == 16 * 128 * bits == len(table.drop_duplicates(["n", "k", "value_bit"]))
    assert len(table.drop_duplicates(["lane", "word", "bit"])) == len(table)
    q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (16, 128), generator=torch.Generator().manual_seed(bits))
    weight = PackedWeight(bits, 128, 16, 128, pack(q.to(torch.int8), bits), torch.ones(16, 1).half())
    stored = to_tiles(weight).tiles.reshape(-1).numpy().view(np.uint32)
    four, rest = (
        stored[:128].reshape(32, 4),
        stored[128:].reshape(32, -1),
    )  # the first words of all lanes, then the others
    words = np.concatenate([four, rest], axis=1)[table["lane"], table["word"]]
    values = (q.numpy() + 2 ** (bits - 1))[table["n"], table["k"]]
    assert np.array_equal(words >> table["bit"] & 1, values >> table["value_bit"] & 1)


@pytest.mark.parametrize("bits", [4, 3])
def test_pictures_of_a_unit_name_lanes_and_k(bits: int):
    table = tiles.unit_table(bits)
    drawn = axes()
    tiles.draw_lanes(drawn, table, "title")
    assert texts(drawn)[:16] == ["0", "1", "2", "3"] * 4  # output 0, runs of eight
    assert texts(drawn)[16 * 9 : 16 * 9 + 4] == ["4", "5", "6", "7"]  # output 9
    drawn = axes()
    tiles.draw_words(drawn, table, 5, "title")
    own = table[table["lane"] == 5]
    assert set(map(int, texts(drawn))) == set(own["k"]) == {k + at for k in (8, 40, 72, 104) for at in range(8)}
    assert sum(field.get_width() for field in drawn.patches) == len(own)
