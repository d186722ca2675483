"""A long prompt chunk's attention: to itself through cuDNN, whose kernels use Hopper's wgmma and TMA as flash attention 2's do
not, and to the keys before it through the latter, which takes their number from the device.
"""

from dataclasses import dataclass

import torch

from deepinfer_lab.kernels.merge_attention import merge_attention
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.attention import PastKeys, Run, flash_splits
from deepinfer_lab.model.config import ModelConfig

OWN_TOKENS = 512  # the least; others are multiples
OWN_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class OwnAttention:
    """Causal attention of float16 tokens to one another, through cuDNN.

    cuDNN compiles a plan for each number of tokens, once in a thread, for which a step cannot be captured: `prepare`. So that
    there are few plans without graphs, too, it takes multiples of `OWN_TOKENS` only.
    """

    heads: int
    kv_heads: int
    head_dim: int
    device: torch.device

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device) -> "OwnAttention | None":
        """For a model's heads; None where the card, cuDNN or torch do not take them, which trying shows."""
        if torch.cuda.get_device_capability(device) < OWN_CAPABILITY:
            return None
        own = cls(config.num_heads, config.num_kv_heads, config.head_dim, device)
        try:
            own.prepare(OWN_TOKENS)
        except (RuntimeError, AttributeError):  # refused; no such operator
            return None
        return own

    def takes(self, tokens: int) -> bool:
        return tokens > 0 and tokens % OWN_TOKENS == 0

    def prepare(self, tokens: int) -> None:
        """Have a plan for a chunk of so many tokens, in this thread."""
        if self.takes(tokens):
            q, kv = (
                torch.zeros(tokens, heads, self.head_dim, dtype=torch.float16, device=self.device)
                for heads in (self.heads, self.kv_heads)
            )
            self(q, kv, kv)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D], contiguous -> results [T, heads, D], and log-sum-exps [heads, T]."""
        by_head = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
        out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *by_head, None, True, 0.0, True
        )  # no bias, log-sum-exps, no dropout, causal
        return out.transpose(1, 2).squeeze(0).contiguous(), sums.view(self.heads, len(q))


class OwnChunk:
    """Many new tokens of one sequence. The host knows the most keys that there can be before them: none, and nothing is merged.

    What a captured step is padded with comes last, and is attended to by itself alone. The chunk's own K and V, too, are read
    from the cache, where there are the sequence's own blocks behind it, since masks do not stop NaN (0 * NaN), which padding
    may compute.
    """

    def __init__(self, run: Run, kv: KVPool, own: OwnAttention) -> None:
        step, sequence = run.step, run.sequences.start
        queries, device = run.tokens.stop - run.tokens.start, step.positions.device
        self._kv, self._own, self._most = kv, own, step.context_lens[sequence] - queries
        past = step.seq_lens[run.sequences] - queries
        positions = torch.cat((torch.arange(self._most, device=device), past + torch.arange(queries, device=device)))
        self._rows = kv.rows(step.block_table[sequence], positions)
        self._past = None
        if self._most:
            splits = flash_splits(queries, own.heads, self._most, device)
            self._past = PastKeys(past, queries, max(1, splits))

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [T, heads, D] of the run's tokens -> results [T, heads * D]."""
        k, v = self._kv.read(layer, self._rows)
        own = self._own(q, k[self._most :], v[self._most :])
        if self._past is None:
            return own[0].flatten(1)
        return merge_attention(*self._past(q, k[: self._most], v[: self._most]), *own).flatten(1)
