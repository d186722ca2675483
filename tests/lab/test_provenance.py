import hashlib
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepinfer_lab.lab import provenance
from deepinfer_lab.lab.record import Record, load


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", "nvidia-geforce-rtx-3050-laptop-gpu"),
        ("cpu Intel(R) Xeon(R) CPU @ 2.20GHz 4 cores", "cpu-intel-xeon-cpu-2-20ghz-4-cores"),
    ],
)
def test_slug(name: str, expected: str):
    assert provenance.slug(name) == expected


@pytest.mark.usefixtures("cpu")
def test_cpu_slug_names_model_and_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provenance, "_cpu_model", lambda: "AMD EPYC")
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    assert provenance.device_slug() == "cpu-amd-epyc-2-cores"


@pytest.mark.usefixtures("cpu")
def test_collect_on_a_cpu(tmp_path: Path):
    found = provenance.collect("bench kernels")
    Record("a", {}, found, "OK", []).save(tmp_path / "a.json")
    assert load(tmp_path / "a.json").provenance == found
    assert found["device"]
    assert re.fullmatch(r"cpu-[a-z0-9-]+-\d+-cores", found["device_slug"])
    assert found["torch"] == torch.__version__
    assert found["driver"] is None
    assert found["command"] == "bench kernels"
    assert datetime.fromisoformat(found["utc"]).utcoffset().total_seconds() == 0


def test_collect_never_imports_cupy():
    script = (
        "import sys; from deepinfer_lab.lab import provenance; provenance.collect(); sys.exit('cupy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_collect_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", uuid="abc", major=9, minor=0, total_memory=7, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    asked = []

    def answer(*command: str) -> str | None:
        asked.append(command)
        return "550.90.07, 1980, [N/A], 1980, 3201, 700.00" if command[0] == "nvidia-smi" else None

    monkeypatch.setattr(provenance, "_output", answer)
    found = provenance.collect()
    assert found["device_slug"] == "nvidia-h200"
    assert found["compute_capability"] == "9.0"
    assert found["driver"] == "550.90.07"
    assert found["clocks"] == {"sm_mhz": 1980.0, "sm_max_mhz": 1980.0, "memory_max_mhz": 3201.0, "power_limit_w": 700.0}
    assert found["commit"] is None
    assert "--id=GPU-abc" in next(command for command in asked if command[0] == "nvidia-smi")


def test_kernel_hashes_cover_every_cuda_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.cu").write_bytes(b"kernel")
    (tmp_path / "b.cuh").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"no kernel")
    monkeypatch.setattr(provenance, "KERNELS", tmp_path)
    hashes = provenance.kernel_hashes()
    assert list(hashes) == ["a.cu", "b.cuh"]
    assert hashes["a.cu"] == hashlib.sha256(b"kernel").hexdigest()


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_commit_and_dirty_speak_of_the_package_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path.resolve() / "package"
    package.mkdir()
    monkeypatch.setattr(provenance, "PACKAGE", package)
    git(tmp_path, "init")
    assert provenance._commit() == (None, None)  # no commit yet
    (package / "a.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit, dirty = provenance._commit()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert dirty is False
    (tmp_path / "record.json").write_text("{}")
    assert provenance._commit() == (commit, False)
    (package / "a.py").write_text("changed = True")
    assert provenance._commit() == (commit, True)


def test_somebody_elses_repository_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path.resolve() / "env" / "package"
    package.mkdir(parents=True)
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "theirs")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance._commit() == (None, None)
