from pathlib import Path

import pytest

from deepinfer_lab.lab import provenance
from deepinfer_lab.lab.data_files import kernel_state


def test_kernels_are_current_until_one_that_the_record_names_changes():
    assert kernel_state({"a.cu": "1", "b.cu": "2"}, {"a.cu": "1", "b.cu": "2", "new.cu": "3"}) == ("current", [])
    assert kernel_state({"b.cu": "2", "a.cu": "1"}, {"a.cu": "9"}) == ("changed since", ["a.cu", "b.cu"])
    assert kernel_state({}, {"a.cu": "1"}) == kernel_state(None, {}) == ("none", [])


def test_where_every_row_names_a_kernel_only_its_sources_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provenance, "KERNELS", tmp_path)
    (tmp_path / "a.cu").write_text('#include <cuda_fp16.h>\n#include "a.cuh"\n')
    (tmp_path / "a.cuh").write_text('  #include "deep.cuh"\n#include "a.cuh"\n')
    (tmp_path / "w4_dequantise.cu").write_text("")
    (tmp_path / "w4_mma_8.cu").write_text('#include "deep.cuh"\n')
    names = ("a.cu", "a.cuh", "b.cu", "deep.cuh", "gone.cu", "w4_dequantise.cu", "w4_mma_8.cu")
    names += ("arrange_rows.cu", "w3_wide_1.cu")
    recorded = dict.fromkeys(names, "1")

    def changed(name: str, *kernels: str | None) -> list[str]:
        return kernel_state(recorded, {**recorded, name: "2"}, kernels)[1]

    assert changed("b.cu", "a", "cublas_fp16") == []
    assert changed("a.cu", "a") == ["a.cu"]
    assert changed("deep.cuh", "a") == ["deep.cuh"]
    assert changed("w4_dequantise.cu", "w4_dequantise_cublas") == ["w4_dequantise.cu"]
    assert changed("w4_mma_8.cu", "w4_mma_small") == ["w4_mma_8.cu"]  # its launcher chooses among several
    assert changed("deep.cuh", "w4_mma_small") == ["deep.cuh"]
    assert changed("w4_mma_8.cu", "w3_mma_small", "w4_dequantise_cublas") == []
    for source in ("w3_wide_1.cu", "arrange_rows.cu"):
        assert changed(source, "w3_wide") == [source]
        assert changed(source, "w4_dequantise_cublas", "w3_mma_small") == []
    assert changed("b.cu", "a", None) == ["b.cu"]  # a row that names none may have run any
    assert changed("b.cu") == ["b.cu"]
    without = {name: digest for name, digest in recorded.items() if name != "gone.cu"}
    assert kernel_state(recorded, without, ["gone"]) == ("changed since", ["gone.cu"])
