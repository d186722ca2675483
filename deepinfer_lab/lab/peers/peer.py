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


class Distributed:
    """The half of a `Peer` that is a package to install: what it is called, and whether it is there."""

    distribution: str

    @property
    def kernel(self) -> str:
        return f"{self.distribution} {installed(self.distribution)}"

    def missing(self) -> str | None:
        if installed(self.distribution) is not None:
            return None
        return f"{self.distribution} is not installed; `pip install 'deepinfer-lab[peers]'` adds the peers"
