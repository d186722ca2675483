"""The choice of a kernel is a table that can be read, checked and replaced."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import LAUNCHERS, dispatch
from deepinfer_lab.kernels.catalogue import PRODUCTS
from deepinfer_lab.kernels.dispatch import ARTICLE, FALLBACK, Row, choose, explain, for_shape, load, validate
from deepinfer_lab.quant.linear import QuantLinear
from deepinfer_lab.quant.rtn import quantise


@pytest.mark.parametrize(
    ("m", "w4", "w3"),
    [
        (1, "w4_gemv", "w3_gemv"),
        (2, "w4_gemv_batch_tile", "w3_gemv_grid_y"),
        (8, "w4_gemv_batch_tile", "w3_gemv_grid_y"),
        (9, "w4_tiled_gemm", "w3_tiled_gemm"),
        (4096, "w4_tiled_gemm", "w3_tiled_gemm"),
    ],
)
def test_the_articles_choice(m, w4, w3):
    assert (choose(4, m), choose(3, m)) == (w4, w3)


def test_cpu_and_other_dtypes_fall_back():
    assert choose(4, 1, device_type="cpu") == FALLBACK
    assert choose(4, 1, dtype=torch.bfloat16) == FALLBACK


def test_the_experiments_are_never_chosen():
    assert not {row.kernel for row in ARTICLE} & {"w3_gemv_batch_tile", "w3_gemv_warp_tile"}


def test_every_product_has_a_launcher():
    assert set(LAUNCHERS) == set(PRODUCTS)
    assert all(product.name == name for name, product in PRODUCTS.items())
    validate(ARTICLE, "the article's table")


def test_impossible_requests():
    with pytest.raises(KernelError, match="M = 0"):
        choose(4, 0)
    with pytest.raises(KernelError, match=r"no kernel for 5-bit weights.*has 3, 4 bits"):
        choose(5, 1)


def test_explanations():
    said = explain(4, 5, 100, 128, 32)
    assert "w4_gemv_batch_tile" in said
    assert "M from 2 to 8" in said
    assert "7 x 1 blocks of 256 threads" in said
    assert "M of 9 and more" in explain(3, 40, 100, 128, 32)
    assert "'cpu'" in explain(4, 1, 64, 128, 32, device_type="cpu")
    assert "torch.bfloat16" in explain(4, 1, 64, 128, 32, dtype=torch.bfloat16)
    assert "cuBLAS" in explain(4, 1, 64, 128, 32, table=(Row(4, 1, None, FALLBACK),))


def test_a_product_without_a_grid_is_explained_by_its_slices():
    table = (Row(3, 1, None, "w3_dequantise_cublas"),)
    assert "weight rows: 1." in explain(3, 64, 100, 3584, 128, table=table)
    assert "cuBLAS. Slices of up to 23296 weight rows: 2." in explain(3, 64, 37888, 3584, 128, table=table)


def rows(*entries):
    return [{"bits": b, "m_min": low, "m_max": high, "kernel": kernel} for b, low, high, kernel in entries]


@pytest.fixture
def write(tmp_path):
    def to_file(table, **more):
        path = tmp_path / "dispatch.json"
        path.write_text(json.dumps({"schema_version": dispatch.SCHEMA_VERSION, "rows": table, **more}))
        return path

    return to_file


def test_a_measured_table_replaces_the_articles(write):
    last = [(4, 65, 128, "w4_dequantise_cublas"), (4, 129, None, FALLBACK)]
    path = write(rows((4, 1, 4, "w4_gemv_batch_tile"), (4, 5, 64, "w4_tiled_gemm"), *last), gpu="any")
    table = load(path)
    assert [choose(4, m, table=table) for m in (1, 4, 5, 64, 65, 129)] == [
        "w4_gemv_batch_tile", "w4_gemv_batch_tile", "w4_tiled_gemm", "w4_tiled_gemm", "w4_dequantise_cublas", FALLBACK,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ([], "no rows"),
        (rows((4, 1, None, "magic")), "unknown kernel 'magic'"),
        (rows((4, 1, None, "w3_tiled_gemm")), "takes 3-bit weights, not 4"),
        (rows((4, 1, None, "w3_dequantise_cublas")), "takes 3-bit weights, not 4"),
        (rows((4, 1, None, "w4_dequantise")), "unknown kernel 'w4_dequantise'"),
        (rows((4, 1, 2, "w4_gemv"), (4, 3, None, FALLBACK)), "takes M = 1 only"),
        (rows((4, 1, 8, "w4_tiled_gemm"), (4, 10, None, FALLBACK)), "expected a row from M = 9"),
        (rows((4, 1, 8, "w4_tiled_gemm"), (4, 8, None, FALLBACK)), "expected a row from M = 9"),
        (rows((4, 1, None, "w4_tiled_gemm"), (4, 8, None, FALLBACK)), "expected a row from M = None"),
        (rows((4, 1, 8, "w4_tiled_gemm")), "no row from M = 9 up"),
        (rows((4, "1", None, FALLBACK)), "whole numbers"),
        ([{"bits": 4}], "not a dispatch table"),
    ],
)
def test_a_wrong_table_is_refused(write, table, complaint):
    with pytest.raises(KernelError, match=complaint):
        load(write(table))


def test_an_unreadable_table_is_refused(tmp_path, write):
    with pytest.raises(KernelError, match="not a dispatch table"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(KernelError, match="not a dispatch table"):
        load(tmp_path / "text.json")
    path = write(rows((4, 1, None, FALLBACK)))
    path.write_text(path.read_text().replace(f'"schema_version": {dispatch.SCHEMA_VERSION}', '"schema_version": 99'))
    with pytest.raises(KernelError, match="schema_version 99"):
        load(path)


# --- rows that name a shape ---

GENERAL = (Row(4, 1, 8, "w4_gemv_batch_tile"), Row(4, 9, None, "w4_tiled_gemm"), Row(3, 1, None, FALLBACK))
OWN = (Row(4, 2, 4, "w4_tiled_gemm_split_k", 96, 128), Row(4, 64, None, "w4_dequantise_cublas", 96, 128))


@pytest.mark.parametrize("table", [(*GENERAL, *OWN), (*OWN, *GENERAL)], ids=["last", "first"])
def test_a_shapes_own_rows_win_there_and_nowhere_else(table):
    validate(table, "a table")
    expected = {
        1: "w4_gemv_batch_tile", 2: "w4_tiled_gemm_split_k", 4: "w4_tiled_gemm_split_k", 5: "w4_gemv_batch_tile",
        63: "w4_tiled_gemm", 64: "w4_dequantise_cublas", 5000: "w4_dequantise_cublas",
    }  # fmt: skip
    kept = for_shape(4, 96, 128, table)
    for m, name in expected.items():
        assert choose(4, m, table=table, n=96, k=128) == choose(4, m, table=kept) == name
        general = choose(4, m, table=GENERAL)
        for n, k in ((128, 96), (96, 96), (None, None), (96, None)):
            assert choose(4, m, table=table, n=n, k=k) == general
    assert choose(3, 2, table=table, n=96, k=128) == FALLBACK
    assert for_shape(4, 5, 5, table) == GENERAL[:2]
    validate(kept, "what a layer keeps")


ranges = st.lists(st.integers(1, 12), max_size=6, unique=True).map(sorted)
names = st.sampled_from(["w4_gemv_batch_tile", "w4_tiled_gemm", "w4_dequantise_cublas", FALLBACK])


@given(general=ranges, own=ranges, kernels=st.lists(names, min_size=20, max_size=20), open_end=st.booleans())
def test_what_a_layer_keeps_chooses_as_the_whole_table_does(general, own, kernels, open_end):
    borders = [1, *(m for m in general if m > 1), None]
    table = [
        Row(4, low, None if high is None else high - 1, kernel)
        for (low, high), kernel in zip(pairwise(borders), kernels, strict=False)
    ]
    for (low, high), kernel in zip(list(pairwise(own))[::2], kernels[10:], strict=False):  # with gaps
        table.append(Row(4, low, high - 1, kernel, 96, 128))
    if open_end:
        table.append(Row(4, 12, None, kernels[19], 96, 128))
    table.append(Row(4, 1, None, FALLBACK, 128, 96))
    validate(table, "a table")
    kept = for_shape(4, 96, 128, table)
    validate(kept, "what a layer keeps")
    assert all(before.kernel != row.kernel for before, row in pairwise(kept))  # nothing that is never reached
    for m in (*range(1, 15), 10**6):
        assert choose(4, m, table=kept) == choose(4, m, table=table, n=96, k=128)


def test_a_layer_keeps_of_a_table_what_is_about_it():
    """Looked up once, when the layer is made: no product searches the rows of other shapes."""
    table = (
        Row(4, 1, None, "w4_tiled_gemm"), Row(4, 1, None, "w4_dequantise_cublas", 96, 40),
        Row(3, 1, None, "w3_tiled_gemm"), Row(4, 1, 8, "w4_gemv_batch_tile", 40, 96),
    )  # fmt: skip
    layer = QuantLinear(quantise(torch.randn(40, 96), 4, 32), table=table)
    assert layer._table == (Row(4, 1, 8, "w4_gemv_batch_tile"), Row(4, 9, None, "w4_tiled_gemm"))


def test_explanations_say_that_a_row_is_about_the_shape():
    table = (*GENERAL, *OWN)
    assert "w4_tiled_gemm_split_k, the table's row for M from 2 to 4 of this shape" in explain(
        4, 3, 96, 128, 32, table=table
    )
    assert "the table's row for M from 1 to 8:" in explain(4, 3, 96, 64, 32, table=table)


def test_tables_with_shapes_are_read_and_so_are_those_of_version_1(write):
    table = [*rows((4, 1, None, FALLBACK)), {**rows((4, 1, 1, "w4_gemv"))[0], "n": 96, "k": 128}]
    assert load(write(table)) == (Row(4, 1, None, FALLBACK), Row(4, 1, 1, "w4_gemv", 96, 128))
    path = write(rows((4, 1, None, FALLBACK)))
    path.write_text(path.read_text().replace(f'"schema_version": {dispatch.SCHEMA_VERSION}', '"schema_version": 1'))
    assert load(path) == (Row(4, 1, None, FALLBACK),)


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        ([Row(4, 1, 4, FALLBACK, 96, 128), Row(4, 4, None, FALLBACK, 96, 128)], "overlap"),
        ([Row(4, 1, None, FALLBACK, 96, 128), Row(4, 9, 9, FALLBACK, 96, 128)], "overlap"),
        ([Row(4, 1, 4, FALLBACK, 96)], "n and k must both be"),
        ([Row(4, 1, 4, FALLBACK, None, 128)], "n and k must both be"),
        ([Row(4, 1, 4, FALLBACK, 96, "128")], "n and k must both be"),
        ([Row(4, 1, 4, FALLBACK, 0, 128)], "n and k must both be"),
        ([Row(4, 0, 4, FALLBACK, 96, 128)], "m_min must be 1 or more"),
        ([Row(4, 9, 4, FALLBACK, 96, 128)], "m_max no less"),
        ([Row(4, 2, 4, "w4_gemv", 96, 128)], "takes M = 1 only"),
        ([Row(4, 2, 4, "w3_gemv_grid_y", 96, 128)], "takes 3-bit weights"),
    ],
)
def test_wrong_rows_of_a_shape_are_refused(own, complaint):
    with pytest.raises(KernelError, match=complaint):
        validate([*GENERAL, *own], "a table")


def test_rows_of_a_shape_alone_are_no_table():
    with pytest.raises(KernelError, match="4 bits: no row from M = 1 up"):
        validate([Row(4, 1, None, FALLBACK, 96, 128)], "a table")


def test_shapes_that_touch_and_bits_that_share_a_shape_do_not_overlap():
    touching = [Row(4, 1, 4, FALLBACK, 96, 128), Row(4, 5, None, FALLBACK, 96, 128), Row(3, 1, None, FALLBACK, 96, 128)]
    validate([*GENERAL, *touching], "a table")
