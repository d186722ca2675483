"""From logits to the next token, reproducibly: randomness is a function of (seed, position), never of the batch."""

from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch

from deepinfer_lab.errors import InvalidSampling


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it stops.

    Attributes:
        max_tokens: the most new tokens, at least 1.
        temperature: 0 takes the likeliest token (greedy); above 0, logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p, in (0, 1].
        seed: the same seed gives the same tokens whatever else the engine is doing.
        ignore_eos: go on to `max_tokens` even after an end-of-sequence token.

    Raises:
        InvalidSampling: a value outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, kind in (
            ("max_tokens", Integral), ("temperature", Real), ("top_k", Integral), ("top_p", Real), ("seed", Integral),
        ):  # fmt: skip
            if not isinstance(getattr(self, name), kind):
                what = "an integer" if kind is Integral else "a number"
                raise InvalidSampling(f"{name} = {getattr(self, name)!r}: allowed is {what}")
        for name, allowed, ok in (
            ("max_tokens", "at least 1", self.max_tokens >= 1),
            ("temperature", "0 (greedy) or more, and finite", 0 <= self.temperature < float("inf")),
            ("top_k", "0 (all) or more", self.top_k >= 0),
            ("top_p", "above 0, at most 1", 0 < self.top_p <= 1),
            ("seed", "from 0 to 2**64 - 1", 0 <= self.seed < 2**64),
        ):
            if not ok:
                raise InvalidSampling(f"{name} = {getattr(self, name)}: allowed is {allowed}")


def uniform(seed: int, position: int) -> float:
    """One number in [0, 1) from a counter-based generator (Philox 4x64), keyed by the seed, counted by the position."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[position, 0, 0, 0])).random())


def _filtered(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in falling order after top-k and top-p, and the token ids that they belong to."""
    # In float64, from the largest logit down: a temperature near 0 overflows towards -inf alone, never to inf - inf.
    values, ids = ((logits.double() - logits.max()) / params.temperature).sort(descending=True, stable=True)
    if params.top_k:
        values, ids = values[: params.top_k], ids[: params.top_k]
    probabilities = values.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities
    kept = int(((before < params.top_p) & (probabilities > 0)).sum())
    kept = max(kept, 1)  # also where the logits are NaN: one request's overflow must not raise for all
    return probabilities[:kept], ids[:kept]


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    """Choose one token for each row.

    Args:
        logits: float32 [S, vocab].
        params: one per row.
        positions: the position in its sequence that each new token will take.
    """
    chosen = logits.argmax(dim=-1).tolist()
    for row, (p, position) in enumerate(zip(params, positions, strict=True)):
        if p.temperature > 0:
            probabilities, ids = _filtered(logits[row], p)
            cumulative = probabilities.cumsum(dim=0)
            threshold = uniform(p.seed, position) * float(cumulative[-1])
            rank = int(torch.searchsorted(cumulative, threshold, right=True).clamp(max=len(ids) - 1))
            chosen[row] = int(ids[rank])
    return chosen
