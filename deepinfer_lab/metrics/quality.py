"""How well a model still predicts text, alone or beside another, through the same paged forward that serves requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div, nll_loss

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.progress import bar

BLOCK_SIZE = 16
CHUNK = 256  # positions whose logits exist at a time: 256 x 49,152 floats are 50 MB


@dataclass(frozen=True)
class TeacherForced:
    """Predictions at every position of a text, given the true tokens before it in its window.

    Attributes:
        nll: negative log-likelihood of each true token, nats, float64 [P].
        top1: the likeliest token at each position, int64 [P].
    """

    nll: np.ndarray
    top1: np.ndarray

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return float(np.exp(self.nll.mean()))

    def agreement(self, other: "TeacherForced") -> float:
        """Share of positions at which both take the same token to be the likeliest."""
        return float((self.top1 == other.top1).mean())


@dataclass(frozen=True)
class Comparison:
    """How far a model's predictions are from a reference model's, over every position of a text.

    Attributes:
        perplexity: of the model on the text.
        kl: mean over positions of KL(reference || model), nats. Unlike perplexity it weighs every token that the reference
            thinks possible, and not only the one that stands in the text.
        top1: share of positions at which both take the same token to be the likeliest.
    """

    perplexity: float
    kl: float
    top1: float


def teacher_forced(model: Decoder, tokens: Sequence[int], window: int) -> TeacherForced:
    """Run a text through a model in windows that do not overlap.

    The first token of each window has nothing before it and is not predicted: P = len(tokens) - number of windows.

    Raises:
        SettingError: a window below 2 or over the model's context, or fewer than 2 tokens.
    """
    nll, top1 = [], []
    for targets, (logits,) in _chunks([model], tokens, window):
        nll.append(cross_entropy(logits, targets, reduction="none").double().cpu())
        top1.append(logits.argmax(dim=-1).cpu())
    return TeacherForced(torch.cat(nll).numpy(), torch.cat(top1).numpy())


def compare(model: Decoder, reference: Decoder, tokens: Sequence[int], window: int) -> Comparison:
    """Run a text through two models of one vocabulary, chunk by chunk in lockstep: only a chunk's logits are ever held.

    Args:
        model, reference: on one device.
        tokens, window: as for `teacher_forced`.

    Raises:
        SettingError: as `teacher_forced` does, for either model, or two vocabularies of different size.
    """
    sizes = model.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        raise SettingError(f"vocabularies of {sizes[0]} and {sizes[1]} tokens: only models of one can be compared")
    positions, nll, kl, same = 0, 0.0, 0.0, 0
    for targets, logits in _chunks([model, reference], tokens, window):
        same += int((logits[0].argmax(dim=-1) == logits[1].argmax(dim=-1)).sum())
        # In float64: of two close models the KL is a small difference of large terms.
        found, expected = (each.double().log_softmax(dim=-1) for each in logits)
        positions += len(targets)
        nll += float(nll_loss(found, targets, reduction="sum"))
        kl += float(kl_div(found, expected, reduction="sum", log_target=True))
    return Comparison(float(np.exp(nll / positions)), kl / positions, same / positions)


@torch.inference_mode()
def _chunks(
    models: Sequence[Decoder], tokens: Sequence[int], window: int
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """The true tokens of each chunk, int64 [p], and every model's logits for them, float32 [p, vocab]."""
    context, device = min(model.config.max_context for model in models), models[0].device
    if not 2 <= window <= context or len(tokens) < 2:
        raise SettingError(
            f"window {window} over {len(tokens)} tokens: allowed are windows of 2 to {context}, and at least 2 tokens"
        )
    blocks = range(-(-window // BLOCK_SIZE))
    caches = [KVPool(model.kv_shape, len(blocks), BLOCK_SIZE, device) for model in models]
    chunks = [
        (start, at, min(at + CHUNK, start + window, len(tokens)))
        for start in range(0, len(tokens), window)
        for at in range(start, min(start + window, len(tokens)), CHUNK)
    ]
    for start, at, end in bar(chunks, desc="reading the text", unit="chunk"):
        last_of_window = end in (start + window, len(tokens))
        following = tokens[at + 1 : end if last_of_window else end + 1]
        # An explicit dtype: where a window's last chunk is a single token there is nothing to predict.
        targets = torch.tensor(following, dtype=torch.int64, device=device)
        step = StepInput.build([Span(tokens[at:end], at - start, blocks, all_logits=True)], BLOCK_SIZE, device)
        logits = [model.forward(step, kv)[: len(targets)] for model, kv in zip(models, caches, strict=True)]
        yield targets, [each.float() for each in logits]
