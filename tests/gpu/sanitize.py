"""Run the GPU tests that reach every kernel's edges under compute-sanitizer, and record what it said.

    python tests/gpu/sanitize.py data/<gpu-slug>/sanitizer.json

memcheck looks for accesses out of bounds, racecheck for shared memory that two threads touch without a barrier between.
Timings under either mean nothing. Exits with 1 unless both find nothing.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from deepinfer_lab.lab import provenance

TESTS = (  # all kernels and their edges, in two minutes; larger shapes take far longer
    "one_hot or (around_the_output and not (mma_small and not 33)) "
    "or (nan_and and not (mma_small or mma_block or wgmma or wide)) or no_positions or (other_block_sizes and (12 or 80)) "
    "or (rotating and 12-80) or (rope_write and 9-3-64) or (rms_norm and 576-7) or (silu_mul and 1536) "
    "or (merge_attention and 37-9) or spin_counts or (weights_in_tiles and 32)"
)
SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) errors"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazards"),
}


def sanitise(tool: str) -> dict[str, object]:
    """One tool over the chosen tests: what it found, and how many tests passed under it."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "pytest", "tests/gpu", "-v", "-k", TESTS]
    # Torch's cache hands out parts of large blocks, beyond whose ends memcheck would see nothing wrong.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = SUMMARY[tool].search(done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    return {
        "problems": int(found.group(1)) if found else None,
        "tests_passed": int(passed.group(1)) if passed else 0,
        "exit_code": done.returncode,
    }


def main(path: Path) -> int:
    facts = provenance.collect()
    tools = {tool: sanitise(tool) for tool in SUMMARY}
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
