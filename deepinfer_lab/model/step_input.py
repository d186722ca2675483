"""What one forward pass computes: a prefill chunk, a decode batch, or a mix of both, as one flattened batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence: `tokens` at positions start, start + 1, ...; its KV lives in `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    all_logits: bool = False  # logits after every token, not only after the last


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

    @classmethod
    def build(cls, spans: Sequence[Span], block_size: int, device: torch.device) -> "StepInput":
        """Flatten spans into one batch. Every span must have at least one token and enough blocks for its last."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, logits_index = [0], []
        for span in spans:
            end = span.start + len(span.tokens)
            assert 0 < len(span.tokens) <= len(span.blocks) * block_size - span.start, f"{span} does not fit its blocks"
            tokens.extend(span.tokens)
            positions.extend(range(span.start, end))
            slots.extend(span.blocks[p // block_size] * block_size + p % block_size for p in range(span.start, end))
            logits_index.extend(range(starts[-1], len(tokens)) if span.all_logits else [len(tokens) - 1])
            starts.append(len(tokens))
        query_lens = tuple(len(span.tokens) for span in spans)
        context_lens = tuple(span.start + len(span.tokens) for span in spans)
        columns = max(-(-length // block_size) for length in context_lens)
        table = [[span.blocks[min(i, len(span.blocks) - 1)] for i in range(columns)] for span in spans]

        def tensor(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            tensor(tokens), tensor(positions), tensor(slots), tensor(starts), tensor(list(context_lens)),
            tensor(table), tensor(logits_index), query_lens, context_lens,
        )  # fmt: skip
