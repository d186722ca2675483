"""Quantisers by name."""

import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.quant import gptq, rtn, scale_search
from deepinfer_lab.quant.layout import PackedWeight

METHODS = ("rtn", "scale-search", "gptq")


def check_method(name: str) -> str:
    """Return a method's name.

    Raises:
        SettingError: no such method.
    """
    if name not in METHODS:
        raise SettingError(f"method '{name}': allowed are {', '.join(METHODS)}")
    return name


def needs_activations(method: str) -> bool:
    """Whether a method wants to see what a layer's inputs look like."""
    return method != "rtn"


def quantise(
    method: str, weight: torch.Tensor, bits: int, group: int, gram: torch.Tensor | None = None
) -> PackedWeight:
    """Quantise weight [N, K] by a method of `METHODS`.

    Args:
        gram: float32 [K, K], mean of x x^T over the layer's inputs; None only where `needs_activations` says no.

    Raises:
        SettingError, QuantisationError: no such method; as the method does.
    """
    if check_method(method) == "rtn":
        return rtn.quantise(weight, bits, group)
    assert gram is not None
    if method == "scale-search":
        return scale_search.quantise(weight, bits, group, gram.diagonal())
    return gptq.quantise(weight, bits, group, gram)
