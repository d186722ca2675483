"""Attention over the paged cache, through torch's scaled_dot_product_attention on gathered blocks."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.step_input import StepInput


def is_decode(step: StepInput) -> bool:
    """Whether the step holds nothing but one new token a sequence."""
    return all(length == 1 for length in step.query_lens)


class TorchAttention:
    """Causal grouped-query attention of one step's new tokens over their sequences' cached keys and values.

    The masks are made once and shared by all layers:
    decode: bool [S, 1, 1, B * block_size], or None where the step holds anything but one new token a sequence.
    prefill: per sequence, bool [query_len, context_len] (causal, bottom right), or None where a mask would hide nothing.
    """

    def __init__(self, step: StepInput, kv: KVPool) -> None:
        self._step, self._kv = step, kv
        device = step.positions.device
        self._decode_mask: torch.Tensor | None = None
        self._prefill_masks: list[torch.Tensor | None] = []
        if is_decode(step):
            keys = torch.arange(step.block_table.shape[1] * kv.block_size, device=device)
            self._decode_mask = (keys < step.seq_lens.unsqueeze(1)).view(len(step.query_lens), 1, 1, -1)
            return
        for query, context in zip(step.query_lens, step.context_lens, strict=True):
            rows = torch.arange(context - query, context, device=device).unsqueeze(1)
            self._prefill_masks.append(None if query == 1 else torch.arange(context, device=device) <= rows)

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [T, heads, head_dim] -> [T, heads * head_dim]. The step's own K and V must already be in the pool."""
        step, kv = self._step, self._kv
        if self._decode_mask is not None:
            return _decode(q, *kv.gather(layer, step.block_table), self._decode_mask)
        pieces, start = [], 0
        for i, (query, context) in enumerate(zip(step.query_lens, step.context_lens, strict=True)):
            k, v = kv.gather(layer, step.block_table[i : i + 1, : -(-context // kv.block_size)])
            pieces.append(_prefill(q[start : start + query], k[0, :context], v[0, :context], self._prefill_masks[i]))
            start += query
        return torch.cat(pieces)


def _decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One new token a sequence. Heads that share a KV head are folded into the query dimension, so K is never repeated.

    q: [S, heads, D]; k, v: [S, L, kv_heads, D]; mask: [S, 1, 1, L] -> [S, heads * D].
    """
    rows, kv_heads = q.shape[0], k.shape[2]
    folded = q.view(rows, kv_heads, -1, q.shape[-1])
    out = scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.reshape(rows, -1)


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A chunk of one sequence. q: [C, heads, D]; k, v: [L, kv_heads, D]; mask: [C, L] -> [C, heads * D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).reshape(q.shape[2], -1)
