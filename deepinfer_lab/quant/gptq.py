"""GPTQ (Frantar and others, 2022): round one column after the other, and let the columns still to come make up for it.

What counts is not how far the weights move but how far the layer's output does, on activations that occur:
||(W - W') X||^2 = tr((W - W') G (W - W')^T) with G = X X^T. Rounding column k of W leaves an error; the change of all later
columns that best undoes it follows from the inverse of G, whose Cholesky factor has the numbers for every column at once.

Columns whose activations are largest go first, while there are many others to make up for them. Each keeps the group that its
place in the weight gives it, with a scale found beforehand (`scale_search`), so that no kernel meets a permutation.
"""

import torch

from deepinfer_lab.errors import QuantisationError
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.rtn import as_groups, levels
from deepinfer_lab.quant.scale_search import search_scales

DAMPING = 0.01  # of the mean of G's diagonal, added to it: the paper's
BLOCK = 128  # columns between two updates of all that follow: the paper's


def quantise(weight: torch.Tensor, bits: int, group: int, gram: torch.Tensor) -> PackedWeight:
    """Quantise a weight for the inputs that it will meet.

    Args:
        weight: floating point [N, K]. bits, group: as in `rtn.quantise`.
        gram: float32 [K, K], the mean of x x^T over activations x [K] of this layer.

    Raises:
        QuantisationError: as `rtn.quantise`; or a gram matrix that is not finite or has another shape.
    """
    w = as_groups(weight, bits, group)
    n, k = weight.shape
    if tuple(gram.shape) != (k, k) or not gram.isfinite().all():
        raise QuantisationError(f"gram matrix of shape {tuple(gram.shape)}: must be finite and [{k}, {k}]")
    importance = gram.diagonal()
    scales = search_scales(w, bits, importance)
    order = importance.argsort(descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order])
    step = scales.float()[:, order // group]  # of each column, in order
    todo = w.view(n, k)[:, order]
    q = torch.empty_like(todo)
    lowest, highest = levels(bits)
    for begin in range(0, k, BLOCK):
        end = min(begin + BLOCK, k)
        block, errors = todo[:, begin:end], torch.empty(n, end - begin, device=w.device)
        for i in range(end - begin):
            column, s = block[:, i], step[:, begin + i]
            rounded = torch.where(s != 0, column / s, 0).round_().clamp_(lowest, highest)
            q[:, begin + i] = rounded
            error = (column - rounded * s) / factor[begin + i, begin + i]
            block[:, i + 1 :].addr_(error, factor[begin + i, begin + i + 1 : end], alpha=-1)
            errors[:, i] = error
        todo[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return PackedWeight(bits, group, n, k, pack(q[:, order.argsort()], bits), scales)


def _inverse_factor(gram: torch.Tensor) -> torch.Tensor:
    """Upper U with U^T U = (gram + damping)^-1. Row k holds how the columns after k make up for an error in column k.

    Damping keeps directions in which no activation points from being used without limit; it is raised tenfold until the
    matrix is positive definite in float32.
    """
    mean = gram.diagonal().mean()
    damping = DAMPING * mean if mean > 0 else torch.ones_like(mean)
    while True:
        damped = gram.clone()
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping = damping * 10
