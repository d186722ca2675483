"""From logits to the next token, reproducibly: randomness is a function of (seed, position), never of the batch.

A request's id is deliberately no part of that key: the same seed and prompt give the same tokens, whatever the request is
called, alone or in any batch, and after it was preempted or resumed.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
import torch

from deepinfer_lab.errors import InvalidSampling

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it stops.

    They apply in this order, which is Hugging Face's (vLLM has min-p before top-k): repetition penalty, banned tokens,
    temperature, top-k, top-p, min-p. Greedy needs the first two alone: the others never remove the likeliest token.

    Attributes:
        max_tokens: the most new tokens, at least 1.
        temperature: 0 takes the likeliest token (greedy); above 0, logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all. Of equally likely ones, lower ids come first.
        top_p: keep the smallest set of tokens whose probability reaches p, in (0, 1].
        seed: the same seed gives the same tokens whatever else the engine is doing.
        ignore_eos: go on to `max_tokens` even after an end-of-sequence token.
        min_p: keep tokens that are at least this fraction, 0 to 1, as likely as the likeliest.
        repetition_penalty: above 1, tokens that stand in the prompt or the output become less likely: a positive logit is
            divided by it (Keskar et al. 2019, CTRL), a negative one multiplied, since dividing would raise it.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
        stop: strings that end the request where the text comes to hold one. One string may stand for itself.
        min_tokens: no token and no stop string ends the request before it has this many new tokens, 0 to `max_tokens`.
        logprobs: None, or n from 0 to 20: report the natural log-probability of the chosen token and of the n likeliest
            ones. They are the model's own: log softmax of the logits before all of the above.

    Raises:
        InvalidSampling: a value of another type or outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("max_tokens", Integral), ("temperature", Real), ("top_k", Integral), ("top_p", Real), ("seed", Integral),
            ("min_p", Real), ("repetition_penalty", Real), ("min_tokens", Integral),
        ):  # fmt: skip
            self._settle(name, _plain(name, getattr(self, name), kind))
        if self.logprobs is not None:
            self._settle("logprobs", _plain("logprobs", self.logprobs, Integral))
        self._settle("stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        ids = _tuple("stop_token_ids", self.stop_token_ids)
        self._settle("stop_token_ids", tuple(_plain("stop_token_ids", token, Integral) for token in ids))
        for name, allowed, ok in (
            ("max_tokens", "at least 1", self.max_tokens >= 1),
            ("temperature", "0 (greedy) or more, and finite", 0 <= self.temperature < float("inf")),
            ("top_k", "0 (all) or more", self.top_k >= 0),
            ("top_p", "above 0, at most 1", 0 < self.top_p <= 1),
            ("seed", "from 0 to 2**64 - 1", 0 <= self.seed < 2**64),
            ("min_p", "from 0 to 1", 0 <= self.min_p <= 1),
            ("repetition_penalty", "above 0, and finite", 0 < self.repetition_penalty < float("inf")),
            ("stop_token_ids", "ids of 0 or more", all(token >= 0 for token in self.stop_token_ids)),
            ("stop", "strings that are not empty", all(isinstance(text, str) and text for text in self.stop)),
            ("min_tokens", f"from 0 to max_tokens = {self.max_tokens}", 0 <= self.min_tokens <= self.max_tokens),
            ("logprobs", f"None, or from 0 to {MOST_LOGPROBS}", 0 <= (self.logprobs or 0) <= MOST_LOGPROBS),
        ):
            if not ok:
                raise InvalidSampling(f"{name} = {getattr(self, name)}: allowed is {allowed}")

    @property
    def greedy_only(self) -> bool:
        """Whether the likeliest token is all that is ever asked for: no draw, no penalty, no ban, no report."""
        plain = self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None
        return plain and self.min_tokens == 0

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # only while it is made, so that later stages meet plain types alone


def _plain(name: str, value: object, kind: type) -> int | float:
    """A number of any library as Python's own. True is refused: for `logprobs` it would silently mean 1."""
    try:
        if isinstance(value, kind) and not isinstance(value, bool):
            return int(value) if kind is Integral else float(value)
    except OverflowError:  # an integer beyond all floats
        pass
    what = "an integer" if kind is Integral else "a number"
    raise InvalidSampling(f"{name} = {value!r}: allowed is {what}")


def _tuple(name: str, value: object) -> tuple:
    if not isinstance(value, list | tuple):
        raise InvalidSampling(f"{name} = {value!r}: allowed is a list or tuple")
    return tuple(value)


class Draw(NamedTuple):
    """What the choice of one token depends on, besides the logits.

    Attributes:
        position: the position in its sequence that the new token will take.
        context: the tokens of prompt and output so far, in any order; read only where there is a repetition penalty.
        banned: tokens that must not be chosen. Ids outside the vocabulary are ignored.
    """

    params: SamplingParams
    position: int
    context: Collection[int] = ()
    banned: Collection[int] = ()


class Choice(NamedTuple):
    """A token that was chosen.

    Attributes:
        logprob: its log-probability; None where the request does not ask for any.
        top: (token, log-probability) of as many of the likeliest tokens as the request asks for, likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def uniform(seed: int, position: int) -> float:
    """One number in [0, 1) from a counter-based generator (Philox 4x64), keyed by the seed, counted by the position."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[position, 0, 0, 0])).random())


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Choice | None]:
    """Choose one token for each row. No row has any influence on another.

    Args:
        logits: [S, vocab] of any floating dtype, left as they are. Taken as float32, which holds them exactly.
        draws: one per row.

    Returns:
        None for a row from which nothing can be chosen: it holds NaN or +inf, or no finite logit that is not banned.
    """
    assert len(draws) == len(logits)
    logits = logits.float()
    scores = _restrained(logits, draws)
    best, tokens = scores.max(dim=-1)  # the first of equals; NaN counts as the largest
    if hot := [row for row, draw in enumerate(draws) if draw.params.temperature > 0]:
        tokens[hot] = _drawn(scores[hot], [draws[row] for row in hot])
    sound, ids = torch.stack((best.isfinite().long(), tokens)).tolist()  # one transfer to the host
    asked = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    reports = dict(zip(asked, _logprobs(logits[asked], tokens[asked]), strict=True)) if asked else {}
    choices: list[Choice | None] = []
    for row, (ok, token) in enumerate(zip(sound, ids, strict=True)):
        logprob, likeliest = reports.get(row, (None, ()))
        choices.append(Choice(token, logprob, likeliest[: draws[row].params.logprobs]) if ok else None)
    return choices


def choose_greedily(logits: torch.Tensor) -> list[Choice | None]:
    """`choose` for rows that are all `greedy_only`."""
    best, tokens = logits.max(dim=-1)
    values, ids = torch.stack((best.double(), tokens.double())).tolist()  # one transfer; ids stay exact
    return [Choice(int(i), None, ()) if math.isfinite(v) else None for v, i in zip(values, ids, strict=True)]


def _restrained(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Logits [S, vocab] after penalties and bans: a copy, or the given ones where there is nothing to change."""
    penalised = [
        (row, token, penalty)
        for row, draw in enumerate(draws)
        if (penalty := draw.params.repetition_penalty) != 1
        for token in set(draw.context)
    ]
    banned = [(row, token) for row, draw in enumerate(draws) for token in draw.banned if 0 <= token < logits.shape[-1]]
    if not penalised and not banned:
        return logits
    scores = logits.clone()
    if penalised:
        table = torch.tensor(penalised, dtype=torch.float64, device=logits.device)
        (rows, tokens), penalties = table[:, :2].T.long(), table[:, 2]
        old = logits[rows, tokens].double()
        scores[rows, tokens] = torch.where(old > 0, old / penalties, old * penalties).to(scores.dtype)
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).T
        scores[rows, tokens] -= float("inf")  # not set to it: a NaN or +inf there must still show
    return scores


def _drawn(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """A token for each row [S] by its temperature and filters, which all keep a beginning of the falling order."""
    vocab = scores.shape[-1]
    settings = [
        (p.temperature, min(p.top_k or vocab, vocab), p.top_p, p.min_p, uniform(p.seed, draw.position))
        for draw in draws
        for p in [draw.params]
    ]
    table = torch.tensor(settings, dtype=torch.float64, device=scores.device)
    temperature, top_k, top_p, min_p, u = table.split(1, dim=1)
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    best = values[:, :1]
    # Probabilities as fractions of the largest, so that a temperature near 0 overflows towards 0 alone.
    relative = ((values.double() - best) / temperature).exp()
    relative = relative.masked_fill(~best.isfinite(), 1.0)  # a row without a choice: any token, `choose` drops it
    # Integers, since their sums do not depend on the order of adding, which on a GPU depends on the batch.
    # They stay below 2**63 up to a vocabulary of 2**23.
    weights = (relative * 2**40).round().long()
    cumulative = weights.cumsum(dim=-1)
    mass = cumulative.gather(1, top_k.long() - 1)  # of the first k; only they begin below it
    kept = (cumulative - weights < top_p * mass) & (relative >= min_p)
    mass = cumulative.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    threshold = (u * mass).long()  # below the mass, however the product is rounded, since u is at most 1 - 2**-53
    return ids.gather(1, torch.searchsorted(cumulative, threshold, right=True)).squeeze(1)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row the log-probability of its token, and of the likeliest tokens, likeliest first."""
    likeliest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :MOST_LOGPROBS]  # topk leaves ties open
    ids = torch.cat((tokens[:, None], likeliest), dim=1)
    values = logits.double().log_softmax(dim=-1).gather(1, ids).tolist()
    return [(v[0], tuple(zip(i[1:], v[1:], strict=True))) for i, v in zip(ids.tolist(), values, strict=True)]
