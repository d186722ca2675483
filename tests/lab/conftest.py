from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder that the package takes for its own."""
    for folder in ("data", "notebooks/scripts"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path))
    monkeypatch.delenv("DEEPINFER_MODE", raising=False)
    return tmp_path
