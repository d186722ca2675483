"""The unit of scheduling: what a lane is asked to run. Prepared, launched and finished by three separate functions."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer_lab.engine.request import Phase, Sequence
from deepinfer_lab.engine.sampling import Choice, choose, choose_greedily
from deepinfer_lab.errors import NonFiniteLogits, OutOfDeviceMemory, RequestFailed
from deepinfer_lab.model.step_input import Span, StepInput


@dataclass(frozen=True)
class Work:
    """One forward pass over some sequences.

    Attributes:
        phase: "prefill" (a chunk of one sequence) or "decode" (one token of each).
        sequences: in the order of the step's spans. counts: new tokens of each.
        cycle: of the scheduler, in which it was prepared.
    """

    phase: Literal["prefill", "decode"]
    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]
    step: StepInput
    cycle: int


def prepare_prefill(sequence: Sequence, tokens: int, cycle: int, block_size: int, device: torch.device) -> Work:
    """The next chunk of at most `tokens` tokens: of the prompt, or after a preemption of all that was there."""
    chunk = sequence.tokens[sequence.computed : sequence.computed + tokens]
    step = StepInput.build([Span(chunk, sequence.computed, sequence.block_table)], block_size, device)
    return Work("prefill", (sequence,), (len(chunk),), step, cycle)


def prepare_decode(sequences: Seq[Sequence], cycle: int, block_size: int, device: torch.device) -> Work:
    """The next token of every given sequence."""
    spans = [Span(s.tokens[-1:], s.computed, s.block_table) for s in sequences]
    return Work("decode", tuple(sequences), (1,) * len(spans), StepInput.build(spans, block_size, device), cycle)


def halves(work: Work, block_size: int, device: torch.device) -> tuple[Work, Work]:
    """A decode batch in two."""
    middle = len(work.sequences) // 2
    first, second = work.sequences[:middle], work.sequences[middle:]
    return (
        prepare_decode(first, work.cycle, block_size, device),
        prepare_decode(second, work.cycle, block_size, device),
    )


def finish(work: Work, logits: torch.Tensor) -> list[tuple[Sequence, Choice | RequestFailed]]:
    """Commit a forward pass that has run: advance its sequences and choose a token for those that are due one.

    A sequence that ended while the work was in flight is left as it is.

    Args:
        logits: [S, vocab], one row per sequence of the work.

    Returns:
        The sequences that are due a token, with the choice, or with the reason why there is none.
    """
    rows, due = [], []
    for row, (sequence, count) in enumerate(zip(work.sequences, work.counts, strict=True)):
        sequence.in_flight = False
        if sequence.phase is Phase.FINISHED:
            continue
        sequence.computed += count
        if sequence.computed == len(sequence.tokens):
            sequence.phase = Phase.DECODE
            rows.append(row)
            due.append(sequence)
    if not due:
        return []
    if len(rows) < len(logits):
        logits = logits[rows]
    return list(zip(due, _choose(logits, due), strict=True))


def _choose(logits: torch.Tensor, due: Seq[Sequence]) -> list[Choice | RequestFailed]:
    """Rows do not depend on one another: where memory lacks for all of them, each half is tried alone."""
    failure = ""
    try:
        if all(sequence.greedy_only for sequence in due):
            choices = choose_greedily(logits)
        else:
            choices = choose(logits, [sequence.draw() for sequence in due])
        return [choice or _not_finite(sequence) for choice, sequence in zip(choices, due, strict=True)]
    except torch.OutOfMemoryError as error:
        failure = str(error)
    if len(due) == 1:
        return [OutOfDeviceMemory(f"request {due[0].request.id}: choosing a token: {failure}")]
    middle = len(due) // 2
    return _choose(logits[:middle], due[:middle]) + _choose(logits[middle:], due[middle:])


def _not_finite(sequence: Sequence) -> NonFiniteLogits:
    return NonFiniteLogits(f"request {sequence.request.id}: logits after {len(sequence.tokens)} tokens are not finite")
