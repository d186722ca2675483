"""What a peer must be able to do."""

import importlib.metadata
from collections.abc import Callable
from typing import Protocol

import torch

from deepinfer_lab.quant.layout import PackedWeight


class Peer(Protocol):
    """Somebody else's product with few-bit weights.

    Attributes:
        name: in records and on the command line. dtype: of the activations that it takes.
        kernel: what multiplies, with its version where that is not torch's.
    """

    name: str
    dtype: torch.dtype

    @property
    def kernel(self) -> str: ...

    def missing(self) -> str | None:
        """Why the peer cannot be had here, and how to get it; None where it can. Imports nothing."""
        ...

    def refusal(self, bits: int, n: int, k: int, group: int) -> str | None:
        """Why it cannot take weights [n, k] of so many bits with such groups; None where it can."""
        ...

    def prepare(self, weight: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        """Bring a weight on a GPU, exactly, into the peer's own form; the result multiplies x [M, K] with it, to [M, N]."""
        ...


def installed(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed. Reads metadata alone: an import may need a GPU."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def how_to_install(distribution: str) -> str | None:
    """What to say of a distribution that is not installed; None where it is."""
    if installed(distribution) is not None:
        return None
    return f"{distribution} is not installed; `pip install 'deepinfer-lab[peers]'` adds the peers"
