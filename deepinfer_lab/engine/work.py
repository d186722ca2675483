"""The unit of scheduling: what a lane is asked to run. Prepared, launched and finished by three separate functions."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer_lab.engine.request import Phase, Sequence
from deepinfer_lab.engine.sampling import Choice, choose, choose_greedily
from deepinfer_lab.errors import NonFiniteLogits, OutOfDeviceMemory, RequestFailed
from deepinfer_lab.model.step_input import Span, StepInput

KNOWN = -1  # in `Work.sources`
UNKNOWN_TOKEN = 0  # stands in a span until the lane puts the real one in its place


@dataclass(frozen=True)
class Work:
    """One forward pass over some sequences.

    Attributes:
        phase: "prefill" (a chunk of one sequence), "decode" (one token of each), or "mixed" (a chunk, then decode rows).
        sequences: in the order of the step's spans. spans: their new tokens. counts: how many of them each has.
        cycle: of the scheduler, in which it was prepared.
        sources: for each sequence `KNOWN`, or the row of the lane's last decode or mixed work whose likeliest token, not seen
            by the host yet, is its input.
    """

    phase: Literal["prefill", "decode", "mixed"]
    sequences: tuple[Sequence, ...]
    spans: tuple[Span, ...]
    counts: tuple[int, ...]
    cycle: int
    sources: tuple[int, ...]

    @property
    def chunk(self) -> Span | None:
        """The prompt chunk, where there is one."""
        return None if self.phase == "decode" else self.spans[0]

    @property
    def decodes(self) -> tuple[Span, ...]:
        """The decode rows."""
        return self.spans if self.phase == "decode" else self.spans[1:]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is all that any of its sequences asks for."""
        return all(sequence.greedy_only for sequence in self.sequences)

    def step(self, block_size: int, device: torch.device) -> StepInput:
        """Its tensors."""
        return StepInput.build(self.spans, block_size, device)


def prepare_prefill(sequence: Sequence, tokens: int, cycle: int) -> Work:
    """The next chunk of at most `tokens` tokens: of the prompt, or after a preemption of all that was there."""
    start = sequence.launched
    span = Span(sequence.tokens[start : start + tokens], start, sequence.block_table)
    return Work("prefill", (sequence,), (span,), (len(span.tokens),), cycle, (KNOWN,))


def prepare_decode(sequences: Seq[Sequence], cycle: int, rows: Mapping[Sequence, int] | None = None) -> Work:
    """The next token of every given sequence.

    Args:
        rows: for those whose last token only the lane knows, its row there.
    """
    ones = (1,) * len(sequences)
    spans = tuple([_next(sequence) for sequence in sequences])
    sources = tuple([rows.get(sequence, KNOWN) for sequence in sequences]) if rows else (KNOWN,) * len(sequences)
    return Work("decode", tuple(sequences), spans, ones, cycle, sources)


def fuse(prefill: Work, decode: Work) -> Work:
    """Both in one forward pass."""
    return Work(
        "mixed",
        prefill.sequences + decode.sequences,
        prefill.spans + decode.spans,
        prefill.counts + decode.counts,
        decode.cycle,
        prefill.sources + decode.sources,
    )


def halves(work: Work) -> tuple[Work, Work]:
    """A mixed batch in its two phases, a decode batch in two."""
    middle = 1 if work.phase == "mixed" else len(work.sequences) // 2

    def part(phase: Literal["prefill", "decode"], rows: slice) -> Work:
        return Work(phase, work.sequences[rows], work.spans[rows], work.counts[rows], work.cycle, work.sources[rows])

    return part("prefill" if work.phase == "mixed" else "decode", slice(middle)), part("decode", slice(middle, None))


def finish(
    work: Work, logits: torch.Tensor, likeliest: torch.Tensor | None = None
) -> list[tuple[Sequence, Choice | RequestFailed]]:
    """Commit a forward pass that has run: advance its sequences and choose a token for those that are due one.

    A sequence that ended while the work was in flight is left as it is.

    Args:
        logits, likeliest: as in `Ticket`, one row per sequence of the work.

    Returns:
        The sequences that are due a token, with the choice, or with the reason why there is none.
    """
    rows, due, finished, decode = [], [], Phase.FINISHED, Phase.DECODE
    for row, (sequence, count) in enumerate(zip(work.sequences, work.counts, strict=True)):
        sequence.in_flight -= 1
        if sequence.phase is finished:
            continue
        sequence.computed = computed = sequence.computed + count
        if computed == len(sequence.tokens):
            sequence.phase = decode
            rows.append(row)
            due.append(sequence)
    if not due:
        return []
    chosen: dict[Sequence, Choice | RequestFailed] = {}
    if likeliest is not None:
        values, ids = likeliest.tolist()
        for row, sequence in zip(rows, due, strict=True):
            if sequence.greedy_only:
                sound = math.isfinite(values[row])
                chosen[sequence] = Choice(int(ids[row]), None, ()) if sound else _not_finite(sequence)
    if len(chosen) < len(due):  # what else is asked for takes the logits themselves, and those of no other row
        rows, others = zip(*[pair for pair in zip(rows, due, strict=True) if pair[1] not in chosen], strict=True)
        logits = logits if len(rows) == len(logits) else logits[list(rows)]
        chosen.update(zip(others, _choose(logits, others), strict=True))
    return [(sequence, chosen[sequence]) for sequence in due]


def _next(sequence: Sequence) -> Span:
    known = sequence.launched < len(sequence.tokens)
    return Span(sequence.tokens[-1:] if known else [UNKNOWN_TOKEN], sequence.launched, sequence.block_table)


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
