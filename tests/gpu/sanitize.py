"""Run the GPU tests that reach every kernel's edges under compute-sanitizer, and record what it said.

    python tests/gpu/sanitize.py data/<gpu-slug>/sanitizer.json

memcheck looks for accesses out of bounds, racecheck for shared memory that two threads touch without a barrier between.
Timings under either mean nothing, so all runs side by side. Exits with 1 unless both find nothing, and prints what they found.

Racecheck is not shown blocks whose teams wait at barriers of their own unequally often: it then misses the barrier of the whole
block that follows. What it reported on an H200 (CUDA 13.0) lay on both sides of that barrier in the machine code, stayed when a
second one was put beside it, and was gone where all teams waited equally often, or at the whole block's barrier alone. The
thread sanitizer, which sees the same sources run on a CPU, finds no race in those blocks
(tests/kernels/test_mma_block_on_cpu.py).
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import torch

from deepinfer_lab.lab import provenance

TESTS = (  # all kernels and their edges; larger shapes take far longer
    "(one_hot and not (wide and not (128_32_2 or 128_64_2 or 192_64))) or (around_the_output and not (mma_small and not 33)) "
    "or (nan_and and not (mma_small or mma_block or wide)) or no_positions or (other_block_sizes and (12 or 80)) "
    "or (rotating and 12-80) or (rope_write and 9-3-64) or (rms_norm and 576-7) or (silu_mul and 1536) "
    "or (merge_attention and 37-9) or spin_counts or (weights_in_tiles and 32) or (every_distance and 4104) "
    "or (only_the_device_knows and 2056) or (pinned_memory and 257) or (outputs_of_few_rows and (1544 or 1280)) "
    "or (decode_chain and (37-257 or 37-500))"
)
MISREAD = {"memcheck": "", "racecheck": " and not (mma_block and one_hot and 160)"}
# Of the tests, by name; each takes about as long.
PARTS = ("mma_block", "wide or decode_chain", "not (mma_block or wide or decode_chain)")
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) errors"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazards"),
}
HAZARD = re.compile(r"Race reported between \w+ access at (?:void )?([\w:]+)")


@dataclass(frozen=True)
class Found:
    """What a tool said. problems: None where it did not get so far. kernels: races reported in each."""

    problems: int | None
    kernels: Counter[str]
    tests_passed: int
    exit_code: int

    def __add__(self, other: "Found") -> "Found":
        known = self.problems is not None and other.problems is not None
        return Found(
            self.problems + other.problems if known else None, self.kernels + other.kernels,
            self.tests_passed + other.tests_passed, max(self.exit_code, other.exit_code),
        )  # fmt: skip


def sanitise(tool: str, part: str) -> Found:
    """One tool over a part of the chosen tests."""
    tests = f"({TESTS}) and ({part}){MISREAD[tool]}"
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "0"]  # 0: nothing is left out
    command += [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-k", tests]
    # Torch's cache hands out parts of large blocks, beyond whose ends memcheck would see nothing wrong.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = SUMMARY[tool].search(done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    if not found or found.group(1) != "0":
        print(*[line for line in done.stdout.splitlines() if line.startswith("=====")][:60], sep="\n")
    return Found(
        int(found.group(1)) if found else None,
        Counter(HAZARD.findall(done.stdout)),
        int(passed.group(1)) if passed else 0,
        done.returncode,
    )


def main(path: Path) -> int:
    if not torch.cuda.is_available():
        sys.exit(f"compute-sanitizer watches kernels on a CUDA GPU, and torch {torch.__version__} finds none here")
    facts = provenance.collect()
    with ThreadPoolExecutor() as pool:
        running = {tool: [pool.submit(sanitise, tool, part) for part in PARTS] for tool in SUMMARY}
        tools = {tool: vars(reduce(add, [part.result() for part in parts])) for tool, parts in running.items()}
    document = {
        "schema_version": 1,
        "kernels": facts.pop("kernels"),
        "tests": TESTS,
        "tools": tools,
        "provenance": facts,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(tools))
    return 0 if all(t["problems"] == 0 and t["exit_code"] == 0 for t in tools.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
