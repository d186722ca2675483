"""Attention over parts of the keys, merged, on a GPU."""

import pytest
import torch

from deepinfer_lab.errors import KernelError
from deepinfer_lab.kernels.merge_attention import merge_attention


def parts_of(tokens: int, heads: int, dim: int, splits: int, empty: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Results and log-sum-exps as flash attention gives them, and the attention over all keys in float64."""
    scores = torch.randn(splits + 1, heads, tokens, 33, device="cuda", dtype=torch.float64) * 4
    values = torch.randn(splits + 1, heads, 33, dim, device="cuda", dtype=torch.float64)
    used = [part for part in range(splits + 1) if part not in empty]
    results = (scores.softmax(-1) @ values).transpose(1, 2).half().contiguous()
    results[list(empty)] = torch.nan
    sums = scores.logsumexp(-1).float()
    sums[list(empty)] = torch.inf
    exact = torch.cat([scores[part] for part in used], dim=-1).softmax(-1)
    exact = (exact @ torch.cat([values[part] for part in used], dim=1)).transpose(0, 1)
    flat = sums[:-1].transpose(0, 1).reshape(heads, -1).contiguous()
    return results[:-1].reshape(splits * tokens, heads, dim), flat, results[-1], sums[-1].contiguous(), exact


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 8), (37, 9, 64), (256, 16, 128), (5, 3, 80)])
@pytest.mark.parametrize(("splits", "empty"), [(1, ()), (8, (0, 3)), (2, (0, 1))])
def test_merge_attention_matches_attention_over_all_keys(tokens, heads, dim, splits, empty):
    *parts, exact = parts_of(tokens, heads, dim, splits, empty)
    out = merge_attention(*parts, torch.full((tokens, heads, dim), torch.nan, device="cuda").half())
    assert ((out.double() - exact).norm() / exact.norm()).item() < 2e-3


def test_merge_attention_refuses_what_does_not_fit():
    *parts, _ = parts_of(4, 2, 16, 3, ())
    with pytest.raises(KernelError, match="parts_lse has shape"):
        merge_attention(parts[0], parts[1][:, :-1].contiguous(), *parts[2:])
