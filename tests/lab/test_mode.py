from pathlib import Path

import pytest
import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.lab import project
from deepinfer_lab.lab.mode import resolve


@pytest.mark.parametrize(
    ("mode", "cuda", "runs_on_cpu", "expected"),
    [
        ("replay", True, True, "replay"),
        ("measure", False, False, "measure"),
        ("auto", False, False, "replay"),
        ("auto", False, True, "measure"),
        ("auto", True, False, "measure"),
    ],
)
@pytest.mark.parametrize("source", ["parameter", "variable"])
def test_resolve(monkeypatch, source: str, mode: str, cuda: bool, runs_on_cpu: bool, expected: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("DEEPINFER_MODE", mode if source == "variable" else "")
    other = "replay" if expected == "measure" else "measure"
    assert resolve(mode if source == "parameter" else other, runs_on_cpu=runs_on_cpu) == expected


def test_a_bad_value_is_named_with_its_origin(monkeypatch):
    monkeypatch.delenv("DEEPINFER_MODE", raising=False)
    with pytest.raises(SettingError, match="'fast' from the parameter `mode` is not one of replay, measure, auto"):
        resolve("fast", runs_on_cpu=True)
    monkeypatch.setenv("DEEPINFER_MODE", "slow")
    with pytest.raises(SettingError, match="'slow' from the environment variable DEEPINFER_MODE"):
        resolve("replay", runs_on_cpu=True)


def test_root_is_found_from_below(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("DEEPINFER_HOME", raising=False)
    for folder in ("data", "notebooks/scripts"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks" / "scripts")
    assert project.root() == tmp_path.resolve()
    assert project.scripts() == tmp_path.resolve() / "notebooks" / "scripts"


def test_root_falls_back_on_the_source_tree_then_explains(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("DEEPINFER_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert (project.root() / "deepinfer_lab").is_dir()
    monkeypatch.setattr(project, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    with pytest.raises(SettingError, match="set DEEPINFER_HOME"):
        project.root()


def test_home_variable_decides_and_must_be_right(tmp_path: Path, monkeypatch, home):
    assert project.root() == home.resolve()
    monkeypatch.setenv("DEEPINFER_HOME", str(home / "data"))
    with pytest.raises(SettingError, match=r"DEEPINFER_HOME=.*does not hold"):
        project.root()
