"""What ran a measurement: device, software, source code, clocks, command, time."""

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]
KERNELS = PACKAGE / "kernels" / "cuda"
CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")  # one package under several names
COMMIT = "DEEPINFER_COMMIT"
ENVIRONMENT = ("device", "driver", "cuda", "torch", "cupy", "numpy", "python", "platform", "threads")
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
CLOCK_KEYS = ("sm_mhz", "memory_mhz", "sm_max_mhz", "memory_max_mhz", "power_limit_w")


def collect(command: str | None = None) -> dict[str, Any]:
    """Everything that a reader needs to judge, or repeat, a measurement made now. JSON values only.

    Args:
        command: what was run; by default this process's command line.

    Returns:
        `device`, `device_slug`; `compute_capability`, `memory_bytes`, `multiprocessors`, `driver`, `clocks` (the GPU's:
        None or empty on a CPU); `cuda`, `torch`, `cupy`, `numpy`, `python`, `platform`, `threads`; `commit` and `dirty`
        (None outside a git checkout); `kernels` (file name -> SHA-256); `command`; `utc` (ISO 8601).
    """
    commit, dirty = _commit()
    return {
        **_device(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),  # a subclass of str, which JSON would not bring back
        "cupy": _cupy_version(),
        "numpy": importlib.metadata.version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "commit": commit,
        "dirty": dirty,
        "kernels": kernel_hashes(),
        "command": command if command is not None else command_line(),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def repeats(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a measurement now would run the very code of an earlier one, in the same environment.

    Never where the commit is unknown, or the code differed from it.
    """
    if now["commit"] is None or now["dirty"] or earlier.get("dirty"):
        return False
    return all(earlier.get(key) == now[key] for key in (*ENVIRONMENT, "commit", "kernels"))


def device_slug() -> str:
    """The name of this machine's record folder, such as "nvidia-h200" or "cpu-amd-epyc-2-cores": [a-z0-9-] only."""
    if torch.cuda.is_available():
        return slug(torch.cuda.get_device_name())
    return slug(f"cpu {_cpu_model()} {cores()} cores")


def slug(name: str) -> str:
    """`name` in lower case, trade marks dropped, every other run of characters outside [a-z0-9] made one hyphen."""
    plain = re.sub(r"\((?:r|tm|c)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def kernel_hashes() -> dict[str, str]:
    """SHA-256 of every file under `kernels/cuda/`, by file name."""
    files = sorted(path for path in KERNELS.glob("*.cu*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def source_hash() -> str:
    """SHA-256 of all Python and CUDA files of the package and their paths: alike wherever the same code lies."""
    digest = hashlib.sha256()
    files = {p.relative_to(PACKAGE).as_posix(): p for kind in ("*.py", "*.cu", "*.cuh") for p in PACKAGE.rglob(kind)}
    for name in sorted(files):
        digest.update(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {
            "device": _cpu_model(),
            "device_slug": device_slug(),
            "compute_capability": None,
            "memory_bytes": None,
            "multiprocessors": None,
            "driver": None,
            "clocks": {},
        }
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, clocks = _nvidia_smi(f"GPU-{properties.uuid}")
    return {
        "device": properties.name,
        "device_slug": device_slug(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "clocks": clocks,
    }


def _nvidia_smi(uuid: str) -> tuple[str | None, dict[str, float]]:
    """Driver version and clocks. By UUID, because CUDA and nvidia-smi number the devices of one machine differently."""
    query = ",".join(("driver_version", *CLOCKS))
    answer = _output("nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    if answer is None:
        return None, {}
    driver, *values = (value.strip() for value in answer.split(","))
    clocks = {}
    for key, value in zip(CLOCK_KEYS, values, strict=False):
        if re.fullmatch(r"\d+(\.\d+)?", value):  # a card that hides a figure answers "[N/A]"
            clocks[key] = float(value)
    return driver, clocks


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use, which in a container is fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cupy_version() -> str | None:
    """From the package's metadata: importing CuPy on a machine without CUDA fails or warns."""
    for name in CUPY_DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _commit() -> tuple[str | None, bool | None]:
    """The source tree's commit, and whether the package differs from it (notebooks and records may: they don't measure)."""
    tree = PACKAGE.parent
    if copied := os.environ.get(COMMIT):  # a tree that was copied to a GPU machine without its history
        return copied, None
    top = _output("git", "-C", str(tree), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != tree:  # an environment folder inside somebody else's repository
        return None, None
    commit = _output("git", "-C", str(tree), "rev-parse", "--verify", "HEAD")
    changes = _output("git", "-C", str(tree), "status", "--porcelain", "--", PACKAGE.name)
    return commit, None if commit is None or changes is None else bool(changes)


def command_line() -> str:
    """This process's own."""
    program = Path(sys.argv[0] or "python").name
    if program.startswith("ipykernel"):
        return "jupyter kernel"  # its arguments name a temporary file and say nothing
    return shlex.join([program, *sys.argv[1:]])


def _output(*command: str) -> str | None:
    """What a command prints, or None if it is absent or fails: provenance reports what it can learn."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
