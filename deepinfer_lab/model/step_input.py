"""What one forward pass computes: a prefill chunk, a decode batch, or a mix of both, as one flattened batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence: `tokens` at positions start, start + 1, ...; its KV lives in `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int] | np.ndarray
    all_logits: bool = False  # logits after every token, not only after the last


@dataclass(frozen=True)
class Carried:
    """Tokens of a step's last rows that only the device knows, since an earlier step has chosen them.

    Attributes:
        last: int64 [N], tokens of an earlier step. sources: int64 [R], for the step's last R tokens: where in `last` the real
            one is, or below 0 where the step has it.
    """

    last: torch.Tensor
    sources: torch.Tensor

    def put_into(self, token_ids: torch.Tensor) -> None:
        """Write them in their places of token_ids [T]."""
        rows = token_ids[len(token_ids) - len(self.sources) :]
        rows.copy_(torch.where(self.sources >= 0, self.last[self.sources.clamp(min=0)], rows))


@dataclass(frozen=True)
class StepInput:
    """A variable-length batch of S sequences with T new tokens in total. Tensors live on the model's device.

    Attributes:
        token_ids, positions, slot_mapping: int64 [T].
        query_start: int64 [S + 1], where each sequence's new tokens begin in the flattened batch.
        seq_lens: int64 [S], tokens of each sequence including the new ones.
        block_table: int64 [S, B], padded with the sequence's own last block: another's might hold NaN.
        logits_index: int64 [L], rows of the flattened batch whose logits are wanted.
        query_lens, context_lens: the same lengths on the host, so that nothing waits for the device to learn them.
        carried: tokens that a forward pass first puts into `token_ids`, if any.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    logits_index: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    carried: Carried | None = None

    @classmethod
    def build(cls, spans: Sequence[Span], block_size: int, device: torch.device) -> "StepInput":
        """Flatten spans into one batch. Every span must have at least one token and enough blocks for its last."""
        lengths = [len(span.tokens) for span in spans]
        context_lens = [span.start + length for span, length in zip(spans, lengths, strict=True)]
        columns = -(-max(context_lens) // block_size)
        table = np.empty((len(spans), columns), np.int64)
        for row, span in enumerate(spans):
            held = len(span.blocks)
            assert 0 < len(span.tokens) <= held * block_size - span.start, f"{span} does not fit its blocks"
            if held >= columns:
                table[row] = span.blocks[:columns]
            else:
                table[row, :held] = span.blocks
                table[row, held:] = span.blocks[-1]
        tokens = np.array([token for span in spans for token in span.tokens])
        starts = np.concatenate(([0], np.cumsum(lengths)))
        first = np.array([span.start for span in spans])
        rows = np.repeat(np.arange(len(spans)), lengths)
        positions = np.arange(len(tokens)) - starts[rows] + first[rows]
        slots = table[rows, positions // block_size] * block_size + positions % block_size
        wanted = starts[1:] - 1
        if any(span.all_logits for span in spans):
            every = [
                np.arange(a if span.all_logits else b - 1, b)
                for span, a, b in zip(spans, starts, starts[1:], strict=False)
            ]
            wanted = np.concatenate(every)

        arrays = (tokens, positions, slots, starts, np.array(context_lens), table, wanted)
        return cls(*(to_device(array, device) for array in arrays), tuple(lengths), tuple(context_lens))


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copied in stream order: a copy from memory that is not pinned would wait for all that the stream has to do."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
