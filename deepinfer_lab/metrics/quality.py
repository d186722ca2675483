"""How well a model still predicts text: perplexity and agreement, through the same paged forward that serves requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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


@torch.inference_mode()
def teacher_forced(model: Decoder, tokens: Sequence[int], window: int) -> TeacherForced:
    """Run a text through a model in windows that do not overlap.

    The first token of each window has nothing before it and is not predicted: P = len(tokens) - number of windows.

    Raises:
        SettingError: a window below 2 or over the model's context, or fewer than 2 tokens.
    """
    if not 2 <= window <= model.config.max_context or len(tokens) < 2:
        raise SettingError(
            f"window {window} over {len(tokens)} tokens: allowed are windows of 2 to {model.config.max_context}, "
            "and at least 2 tokens"
        )
    blocks = range(-(-window // BLOCK_SIZE))
    kv = KVPool(model.kv_shape, len(blocks), BLOCK_SIZE, model.device)
    nll, top1 = [], []
    chunks = [
        (start, at, min(at + CHUNK, start + window, len(tokens)))
        for start in range(0, len(tokens), window)
        for at in range(start, min(start + window, len(tokens)), CHUNK)
    ]
    for start, at, end in bar(chunks, desc="reading the text", unit="chunk"):
        last_of_window = end in (start + window, len(tokens))
        following = tokens[at + 1 : end if last_of_window else end + 1]
        # An explicit dtype: where a window's last chunk is a single token there is nothing to predict.
        targets = torch.tensor(following, dtype=torch.int64, device=model.device)
        step = StepInput.build([Span(tokens[at:end], at - start, blocks, all_logits=True)], BLOCK_SIZE, model.device)
        logits = model.forward(step, kv)[: len(targets)]
        nll.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().cpu())
        top1.append(logits.argmax(dim=-1).cpu())
    return TeacherForced(torch.cat(nll).numpy(), torch.cat(top1).numpy())
