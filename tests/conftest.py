"""Fixtures and settings that all tests share."""

import os
from pathlib import Path

import pytest

os.environ["DEEPINFER_MODE"] = "replay"  # before any notebook kernel starts: tests compare, they never measure
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, as `make model` left it in the cache."""
    from deepinfer_lab.model.catalog import obtain

    return obtain("smollm2-135m")
