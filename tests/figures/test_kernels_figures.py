"""The kernels' pictures show what their tables say, and the maps' tables say what the layouts and the CUDA sources do."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from drawing import axes, texts

from deepinfer_lab.figures import kernels, maps, style
from deepinfer_lab.kernels.catalogue import PRODUCTS
from deepinfer_lab.lab.kernel_cells import kernels_for
from deepinfer_lab.quant.layout import pack


@pytest.mark.parametrize("bits", [3, 4])
def test_bit_table_is_the_layout(bits: int):
    """Set one bit of one value at a time, pack, and see which bit of which byte is set."""
    table = maps.bit_table(bits)
    assert len(table) == 8 * bits
    for cell in table.itertuples():
        field = 1 << cell.value_bit
        signed = field - (1 << bits) if field >= 1 << (bits - 1) else field
        q = torch.zeros(1, 8, dtype=torch.int8)
        q[0, cell.value] = signed
        packed = pack(q, bits)[0].tolist()
        assert packed == [1 << cell.bit if byte == cell.byte else 0 for byte in range(bits)]


def test_bit_layout_outlines_the_values_that_straddle():
    drawn = {bits: axes() for bits in (3, 4)}
    for bits, its in drawn.items():
        maps.draw_bit_layout(its, maps.bit_table(bits), "title")
        assert [t for t in texts(its) if t.startswith("byte")] == [f"byte {byte}" for byte in range(bits)]
    outlined = {
        bits: [(p.get_x(), p.get_width()) for p in its.patches if not p.get_fill()] for bits, its in drawn.items()
    }
    assert outlined == {3: [(6, 3), (15, 3)], 4: []}  # q2 from bit 6 on, q5 from bit 15 on


@pytest.mark.parametrize("bits", [3, 4])
def test_unpack_table_has_every_cell_once_and_eight_to_a_thread(bits: int):
    table = maps.unpack_table(bits)
    assert len(table) == 32 * 64 == len(table.drop_duplicates(["k", "n"]))
    assert (table.groupby("thread").size() == 8).all()
    assert table["straddles"].mean() == (0.25 if bits == 3 else 0)  # two of eight values
    drawn = axes()
    maps.draw_unpack_map(drawn, table, "title", columns=8, lanes=True)
    assert drawn.images[0].get_array().shape == (32, 8)
    first = table[table["n"] == 0].sort_values("k")["lane"].tolist()
    assert first == [k // 8 if bits == 3 else k // 2 for k in range(32)]  # the article, sections 2.3 and 2.4
    assert texts(drawn)[: 8 * 32 : 8] == [str(lane) for lane in first]


def test_output_table_gives_each_thread_two_rows_by_four_columns():
    table = maps.output_table()
    assert len(table.drop_duplicates(["m", "n"])) == 32 * 64
    for thread, cells in table.groupby("thread"):  # section 2.2: 2 * (tid >> 4) and 4 * (tid & 15)
        assert cells["m"].unique().tolist() == [2 * (thread >> 4), 2 * (thread >> 4) + 1]
        assert cells["n"].unique().tolist() == [4 * (thread & 15) + j for j in range(4)]
    drawn = axes()
    maps.draw_output_map(drawn, table, "title")
    assert len(drawn.patches) == len(drawn.texts) == 256


@pytest.mark.parametrize(("bits", "turns"), [(4, 16), (3, 4)])
def test_bank_pictures_show_the_turns_with_and_without_padding(bits: int, turns: int):
    table = maps.bank_table(bits)
    assert table.groupby("row_length")["words"].max().to_dict() == {64: turns, 65: 1}
    # 32 lanes of halves: 16 words, as the two rows of W4 and of W3 that share a word go together
    assert table.groupby("row_length")["words"].sum().to_dict() == {64: 16, 65: 16}
    for length, text in ((64, f"{turns} turns"), (65, "1 turn")):
        drawn = axes()
        maps.draw_banks(drawn, table, length, "title")
        assert texts(drawn) == [text]
        assert [bar.get_height() for bar in drawn.patches] == table[table["row_length"] == length]["words"].tolist()


def speedups() -> pd.DataFrame:
    return pd.DataFrame(
        {"shape": ["a", "b"] * 2, "source": ["article"] * 2 + ["here"] * 2, "speedup": [2.0, 9.0, 0.5, np.nan]}
    )


def test_speedups_begin_at_one_and_leave_out_what_is_missing():
    drawn = axes()
    kernels.draw_speedups(drawn, speedups(), "title")
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in drawn.patches]
    assert spans[:3] == [(1, 2.0), (1, 9.0), (1, 0.5)]
    assert texts(drawn) == ["2.00x", "9.00x", "0.50x"]
    low, high = drawn.get_xlim()
    assert low < 0.5
    assert high > 9.0
    assert mpl.colors.to_hex(drawn.patches[0].get_facecolor()) == style.PUBLISHED


def times(bits: int, by: str) -> pd.DataFrame:
    m = [1, 2, 8, 9, 64]
    return pd.DataFrame(
        [{by: rows, "kernel": kernel, "us": 10.0 * rows + len(kernel), "floor_us": 40.0 if its == 16 else 3.0 + rows}
         for its in (bits, 16) for rows in m for kernel in kernels_for(its, rows)]
    )  # fmt: skip


@pytest.mark.parametrize("bits", [3, 4])
def test_crossover_has_a_line_for_every_kernel_and_the_few_bit_floor(bits: int):
    drawn, table = axes(), times(bits, "m")
    kernels.draw_crossover(drawn, table, "title")
    lines = {line.get_label(): line for line in drawn.lines}
    assert len(lines) == len(table["kernel"].unique()) + 1
    assert lines["memory floor"].get_ydata().tolist() == [4, 5, 11, 12, 67]  # not the dense weight's
    tiled = table[table["kernel"] == f"w{bits}_tiled_gemm"]
    assert lines["tiled_gemm"].get_ydata().tolist() == tiled["us"].tolist()
    assert len(lines["gemv"].get_xdata()) == 1  # one row only
    assert (drawn.get_xscale(), drawn.get_yscale()) == ("log", "log")
    assert "µs" in drawn.get_ylabel()


def test_small_batches_are_drawn_from_zero_up():
    drawn, table = axes(), times(3, "batch")
    kernels.draw_small_batch(drawn, table, "title")
    assert drawn.get_ylim()[0] == 0
    assert drawn.get_ylim()[1] > table["us"].max()
    assert drawn.get_yscale() == "linear"


def test_every_kernel_has_a_look_of_its_own_whatever_its_bits():
    names = [*PRODUCTS, "dequant_cublas", "cublas_fp16"]
    looks = {name: tuple(kernels.look(name).values()) for name in names}
    designs = {name[3:] if name[0] == "w" else name for name in names}
    assert len(set(looks.values())) == len(designs)
    assert looks["w3_tiled_gemm"] == looks["w4_tiled_gemm"]


def test_resources_are_written_beside_their_bars():
    table = pd.DataFrame(
        {"kernel": ["a", "b"] * 2, "arch": ["sm_86"] * 2 + ["sm_90"] * 2, "registers": [64, 105, 61, 7]}
    )
    drawn = axes()
    kernels.draw_resources(drawn, table, "registers", "title", "registers of a thread")
    assert [bar.get_width() for bar in drawn.patches] == [64, 105, 61, 7]
    assert [text.strip() for text in texts(drawn)] == ["64", "105", "61", "7"]
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == ["a", "b"]
