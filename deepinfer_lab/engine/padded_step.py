"""A forward pass of fixed sizes, so that a CUDA graph can repeat it: its input is one block of memory, padded."""

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_lab.engine.work import KNOWN, Work
from deepinfer_lab.model.step_input import Carried, StepInput

FEWEST_ROWS, FEWEST_TOKENS, FEWEST_POSITIONS = 1, 16, 1024


@dataclass(frozen=True)
class PaddedShape:
    """Sizes of a forward pass.

    Attributes:
        chunk: tokens of the prompt chunk, or 0. rows: decode rows, or 0. columns: KV blocks of every sequence.
        chained: its layers are one launch, of one decode row, which wants the device for itself (`Decoder.chain`).
    """

    chunk: int
    rows: int
    columns: int
    chained: bool = False

    @property
    def tokens(self) -> int:
        return self.chunk + self.rows

    @property
    def sequences(self) -> int:
        return (self.chunk > 0) + self.rows


def ladder(least: int, most: int, factor: int = 2) -> list[int]:
    """least, least * factor, least * factor ** 2, ... below `most`, and `most`."""
    steps = []
    while least < most:
        steps.append(least)
        least *= factor
    return [*steps, most]


class PaddedInput:
    """Where a padded step's numbers lie: views of one int64 array, on the host or on the device.

    Attributes: as in `StepInput`, and
        sources: [rows], as in `Work`, of the decode rows.
        answer: [1], the address of host memory for the likeliest tokens, or 0.
    """

    def __init__(self, shape: PaddedShape, memory: torch.Tensor) -> None:
        self.shape, self.memory = shape, memory
        sizes = self._sizes(shape)
        (
            self.token_ids, self.positions, self.slot_mapping, self.query_start, self.seq_lens, self.logits_index,
            self.sources, self.answer, table,
        ) = memory.split(sizes)  # fmt: skip
        self.block_table = table.view(shape.sequences, shape.columns)

    @staticmethod
    def _sizes(shape: PaddedShape) -> list[int]:
        tokens, sequences = shape.tokens, shape.sequences
        table = sequences * shape.columns
        return [tokens, tokens, tokens, sequences + 1, sequences, sequences, shape.rows, 1, table]

    @classmethod
    def length(cls, shape: PaddedShape) -> int:
        """Numbers that the memory must have."""
        return sum(cls._sizes(shape))

    def step(self, block_size: int, last: torch.Tensor) -> StepInput:
        """The same as the forward pass takes it. Its host lengths are the padded ones. last: what sources are rows of."""
        shape = self.shape
        chunk = (shape.chunk,) if shape.chunk else ()
        return StepInput(
            self.token_ids, self.positions, self.slot_mapping, self.query_start, self.seq_lens, self.block_table,
            self.logits_index, chunk + (1,) * shape.rows, (shape.columns * block_size,) * shape.sequences,
            Carried(last, self.sources) if shape.rows else None,
        )  # fmt: skip

    def fill(self, work: Work, block_size: int, scratch: int, max_context: int, answer: int) -> None:
        """Write a piece of work that is no larger than the shape.

        Padding tokens of a chunk go on behind it, at positions that nothing attends to. Padding rows are sequences of one
        token. All of them write to the scratch block.
        """
        shape = self.shape
        tokens, positions, slots = self.token_ids.numpy(), self.positions.numpy(), self.slot_mapping.numpy()
        lengths, wanted, table = self.seq_lens.numpy(), self.logits_index.numpy(), self.block_table.numpy()
        first = 0
        starts = self.query_start.numpy()
        starts[0] = 0
        if shape.chunk:
            span = work.chunk
            real, at = len(span.tokens), slice(0, shape.chunk)
            tokens[:real], tokens[real : shape.chunk] = span.tokens, 0
            positions[at] = np.arange(span.start, span.start + shape.chunk)
            _put_blocks(table[0], span.blocks)
            slots[at] = table[0][np.minimum(positions[at] // block_size, shape.columns - 1)] * block_size
            slots[at] += positions[at] % block_size
            slots[real : shape.chunk] = scratch * block_size
            np.minimum(positions[at], max_context - 1, out=positions[at])
            lengths[0], wanted[0], starts[1], first = span.start + shape.chunk, real - 1, shape.chunk, 1
        rows = work.decodes
        sources = self.sources.numpy()
        offset = shape.chunk
        starts[first:] = np.arange(offset, offset + shape.rows + 1)
        wanted[first:] = np.arange(offset, offset + shape.rows)
        for row, span in enumerate(rows):
            tokens[offset + row], positions[offset + row] = span.tokens[0], span.start
            _put_blocks(table[first + row], span.blocks)
        used = slice(offset, offset + len(rows))
        at = positions[used]
        slots[used] = table[np.arange(first, first + len(rows)), at // block_size] * block_size + at % block_size
        lengths[first : first + len(rows)] = at + 1
        sources[: len(rows)] = work.sources[first:] if rows else ()
        padding = slice(offset + len(rows), None)
        tokens[padding], positions[padding], slots[padding] = 0, 0, scratch * block_size
        lengths[first + len(rows) :] = 1
        table[first + len(rows) :] = scratch
        sources[len(rows) :] = KNOWN
        self.answer.numpy()[0] = answer


def _put_blocks(row: np.ndarray, blocks: np.ndarray) -> None:
    """Padded with the sequence's own last block, as `StepInput` has it."""
    held = min(len(blocks), len(row))
    row[:held] = blocks[:held]
    row[held:] = blocks[-1]
