"""The tests that `tests/gpu/sanitize.py` chooses by name: renamed ones would silently be none."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).parents[1] / "gpu"
KINDS = (
    "attention", "decode_chain_on_gpu", "dense_rows", "dequantise", "elementwise", "ends", "gemv", "launch", "merge_attention",
    "mma_block", "mma_small", "spin", "wide",
)  # fmt: skip


def test_each_kind_of_kernel_is_among_them():
    spec = importlib.util.spec_from_file_location("sanitize", GPU / "sanitize.py")
    sanitize = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sanitize  # dataclasses look it up
    spec.loader.exec_module(sanitize)
    command = [sys.executable, "-m", "pytest", GPU, "--collect-only", "-q", "-k", sanitize.TESTS]
    said = subprocess.run(command, cwd=GPU.parents[1], capture_output=True, text=True).stdout
    assert set(re.findall(r"test_(\w+)\.py: \d+", said)) == set(KINDS)
