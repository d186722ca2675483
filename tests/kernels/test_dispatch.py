"""The choice of a kernel is a table that can be read, checked and replaced."""

import json

import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels import LAUNCHERS, dispatch
from deepinfer_lab.kernels.catalogue import PRODUCTS
from deepinfer_lab.kernels.dispatch import ARTICLE, FALLBACK, Row, choose, explain, load, validate


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
