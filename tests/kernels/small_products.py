"""What tests of the tensor-core kernel for a few rows share: its launchers on the CPU, and which of its forms they take."""

from collections.abc import Callable

import pytest
import torch

from deepinfer_lab.kernels import mma_small, tiles_check
from deepinfer_lab.kernels.mma_small import Card, Plan

FORMS = ("8", "8_pair", "8_many", "16", "16_pair", "16_many", "32", "32_many")


def stand_in(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]) -> None:
    """The launchers, sending their work to the CPU program; the check for a CUDA device is left out."""
    monkeypatch.setattr(mma_small, "launch_op", launch)
    for module in (mma_small, tiles_check):
        monkeypatch.setattr(module, "expect", lambda *_, **__: None)
    monkeypatch.setattr(mma_small, "_card", lambda _: Card(multiprocessors=2, shared=2**22))


def force(monkeypatch: pytest.MonkeyPatch, form: str) -> int:
    """This kernel, whatever the launcher would take; the number of its rows."""
    rows, columns = int(form.split("_")[0]), 32 if "pair" in form else 16
    monkeypatch.setattr(
        mma_small, "plan", lambda bits, m, n, _: Plan(f"w{bits}_mma_{form}", (-(-m // rows), -(-n // columns)))
    )
    return rows


def activations(m: int, k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).half()


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()
