"""Scales that lose least: of each group, the one under which the rounded values miss the weights by the least.

Round to nearest takes its scale from the group's largest value alone. A smaller one clips that value and brings all others
closer, which pays where they matter more; how much an error at one k matters is the mean square of the activation there.
"""

import torch

from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.rtn import as_groups, extreme_scales, nearest

# Of the scale that puts the largest value on the lowest level. Above 1 nothing is clipped, and other values may fit better.
FACTORS = tuple(0.4 + 0.025 * i for i in range(29))
CHUNK = 1 << 22  # weights that are searched at a time


def quantise(weight: torch.Tensor, bits: int, group: int, importance: torch.Tensor) -> PackedWeight:
    """Round to nearest under searched scales.

    Args:
        weight, bits, group: as in `rtn.quantise`. importance: [K], as in `search_scales`.

    Raises:
        QuantisationError: as `rtn.quantise`.
    """
    w = as_groups(weight, bits, group)
    scales = search_scales(w, bits, importance)
    n, k = weight.shape
    return PackedWeight(bits, group, n, k, pack(nearest(w, scales, bits).view(n, k), bits), scales)


def search_scales(w: torch.Tensor, bits: int, importance: torch.Tensor) -> torch.Tensor:
    """The best of 58 scales for each group: 29 sizes, and either sign, since the lowest level has no positive partner.

    Args:
        w: float32 [N, G, group]. importance: [K], what a squared error at each k counts, 0 or more.

    Returns:
        float16 [N, G], which minimise sum_k importance[k] * (w[n, k] - q[n, k] * scale)^2 among the candidates.
    """
    importance = importance.float().view(w.shape[1:])
    rows = max(1, CHUNK // importance.numel())
    return torch.cat([_search(part, bits, importance) for part in w.split(rows)])


def _search(w: torch.Tensor, bits: int, importance: torch.Tensor) -> torch.Tensor:
    base = extreme_scales(w, bits)
    scales = base.to(torch.float16)
    best = torch.full_like(base, torch.inf)
    for factor in (*FACTORS, *(-f for f in FACTORS)):
        candidate = (base * factor).to(torch.float16)
        missed = w - nearest(w, candidate, bits) * candidate.float().unsqueeze(2)
        loss = (missed.square_() * importance).sum(dim=2)
        better = loss < best
        best, scales = torch.where(better, loss, best), torch.where(better, candidate, scales)
    return scales
