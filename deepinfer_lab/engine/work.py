"""The unit of scheduling: what a lane is asked to run. Prepared, launched and finished by three separate functions."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer_lab.engine.request import Phase, Sequence
from deepinfer_lab.engine.sampling import sample
from deepinfer_lab.model.step_input import Span, StepInput


@dataclass(frozen=True)
class Work:
    """One forward pass over some sequences.

    Attributes:
        phase: "prefill" (a chunk of one prompt) or "decode" (one token of each sequence).
        sequences: in the order of the step's spans. counts: new tokens of each.
    """

    phase: Literal["prefill", "decode"]
    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]
    step: StepInput


def prepare_prefill(sequence: Sequence, tokens: int, block_size: int, device: torch.device) -> Work:
    """The next chunk of at most `tokens` prompt tokens."""
    prompt = sequence.request.prompt
    chunk = prompt[sequence.computed : sequence.computed + tokens]
    step = StepInput.build([Span(chunk, sequence.computed, sequence.blocks)], block_size, device)
    return Work("prefill", (sequence,), (len(chunk),), step)


def prepare_decode(sequences: Seq[Sequence], block_size: int, device: torch.device) -> Work:
    """The next token of every given sequence."""
    spans = [Span(s.output[-1:], s.computed, s.blocks) for s in sequences]
    return Work("decode", tuple(sequences), (1,) * len(spans), StepInput.build(spans, block_size, device))


def finish(work: Work, logits: torch.Tensor) -> list[tuple[Sequence, int]]:
    """Commit a forward pass that has run: advance its sequences and sample for those that are due a token.

    Args:
        logits: [S, vocab], one row per sequence of the work.

    Returns:
        The sequences that gained a token, with the token.
    """
    due = []
    for row, (sequence, count) in enumerate(zip(work.sequences, work.counts, strict=True)):
        sequence.computed += count
        if sequence.computed >= len(sequence.request.prompt):
            sequence.phase = Phase.DECODE
            due.append((row, sequence))
    if not due:
        return []
    rows = [row for row, _ in due]
    tokens = sample(logits[rows], [s.request.params for _, s in due], [s.length for _, s in due])
    for (_, sequence), token in zip(due, tokens, strict=True):
        sequence.output.append(token)
    return [(sequence, token) for (_, sequence), token in zip(due, tokens, strict=True)]
