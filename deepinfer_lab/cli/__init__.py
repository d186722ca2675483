"""The command `deepinfer-lab`."""

from deepinfer_lab.cli.main import main

__all__ = ["main"]
