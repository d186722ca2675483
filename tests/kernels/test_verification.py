"""What ran on a GPU must be what is here: verification.json against the CUDA sources, without a GPU."""

import copy
import hashlib
import json
from pathlib import Path

import pytest

from deepinfer_lab.kernels.catalogue import SOURCES

DATA = Path(__file__).parents[2] / "data"
REQUIRED = (
    "test_w4a16_tiled_prefill_matches_dequantized_reference",
    "test_w3a16_tiled_prefill_matches_dequantized_reference",
)
ELSEWHERE = ("test_devices_without_them_are_refused",)  # on cards that lack what this one has


def complaints(document: dict, sources: Path) -> list[str]:
    """What is wrong with a verification.json, seen from the CUDA sources as they are now. Empty: all is well."""
    found = []
    now = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources.glob("*.cu*")}
    verified = document["kernels"]
    for name in sorted(now.keys() | verified.keys()):
        if name not in verified:
            found.append(f"{name} was never verified on a GPU")
        elif name not in now:
            found.append(f"{name} was verified and is gone")
        elif now[name] != verified[name]:
            found.append(f"{name} has changed since it was verified")
    for test, outcome in sorted(document["tests"].items()):
        if outcome != "passed" and test.split("::")[-1] not in ELSEWHERE:
            found.append(f"{test}: {outcome}")
    names = {test.split("::")[-1].split("[")[0] for test in document["tests"]}
    found += [f"{test} did not run" for test in REQUIRED if test not in names]
    return found


@pytest.mark.parametrize("path", sorted(DATA.glob("*/verification.json")), ids=lambda path: path.parent.name)
def test_cuda_sources_are_those_that_passed_on_the_gpu(path):
    found = complaints(json.loads(path.read_text(encoding="utf-8")), SOURCES)
    assert found == [], "re-run on the GPU: DEEPINFER_VERIFICATION=<this file> pytest tests/gpu"


@pytest.mark.parametrize("path", sorted(DATA.glob("*/sanitizer.json")), ids=lambda path: path.parent.name)
def test_sanitizers_found_nothing_in_these_sources(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    now = {source.name: hashlib.sha256(source.read_bytes()).hexdigest() for source in SOURCES.glob("*.cu*")}
    assert document["kernels"] == now, "re-run on the GPU: python tests/gpu/sanitize.py <this file>"
    assert document["tools"].keys() == {"memcheck", "racecheck"}
    for tool, found in document["tools"].items():
        assert found["problems"] == 0, (tool, found["kernels"])
        assert found["exit_code"] == 0, tool
        assert found["tests_passed"] > 0, tool


@pytest.fixture
def good() -> dict:
    return {
        "kernels": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in SOURCES.glob("*.cu*")},
        "tests": {f"tests/gpu/test_tiled_gemm.py::{test}[64]": "passed" for test in REQUIRED},
    }


def test_a_true_document_raises_no_complaint(good):
    assert complaints(good, SOURCES) == []


def test_the_check_sees_a_changed_kernel(good, tmp_path):
    for path in SOURCES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes() + (b"// " if path.name == "w4_gemv.cu" else b""))
    assert complaints(good, tmp_path) == ["w4_gemv.cu has changed since it was verified"]


def test_the_check_sees_new_and_missing_kernels(good):
    other = copy.deepcopy(good)
    other["kernels"]["gone.cu"] = "0" * 64
    del other["kernels"]["ptx.cuh"]
    assert complaints(other, SOURCES) == ["gone.cu was verified and is gone", "ptx.cuh was never verified on a GPU"]


def test_the_check_sees_failed_skipped_and_missing_tests(good):
    other = copy.deepcopy(good)
    first, second = other["tests"]
    other["tests"][first] = "failed"
    other["tests"]["test_other"] = "skipped"
    del other["tests"][second]
    assert complaints(other, SOURCES) == ["test_other: skipped", f"{first}: failed", f"{REQUIRED[1]} did not run"]
