"""A padded step holds the same numbers as the step that it pads, and its padding touches nobody's blocks."""

import numpy as np
import pytest
import torch
from bench import request
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.engine.padded_step import PaddedInput, PaddedShape, ladder
from deepinfer_lab.engine.request import Sequence
from deepinfer_lab.engine.stopping import Stopper
from deepinfer_lab.engine.work import KNOWN, fuse, prepare_decode, prepare_prefill

BLOCK, SCRATCH, MAX_CONTEXT = 4, 1000, 40
CPU = torch.device("cpu")


def sequence(length: int, launched: int, first_block: int) -> Sequence:
    item = request(f"{length} {launched} {first_block}", length, 9)
    made = Sequence(item, 0, Stopper(item.params, (), None))
    made.launched = launched
    made.blocks = list(range(first_block, first_block + -(-(length + 1) // BLOCK)))
    made.block_table = np.array(made.blocks)
    return made


def filled(work, shape: PaddedShape) -> PaddedInput:
    memory = torch.full((PaddedInput.length(shape),), -7, dtype=torch.int64)
    padded = PaddedInput(shape, memory)
    padded.fill(work, BLOCK, SCRATCH, MAX_CONTEXT, 0)
    return padded


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(lengths, st.integers(0, 3), st.integers(0, 29), st.integers(1, 9), st.integers(0, 7), st.integers(0, 4))
def test_every_number_of_the_step_is_there(rows, more_rows, start, chunk, more_tokens, more_columns):
    decoding = [sequence(length, length - 1, 20 * i) for i, length in enumerate(rows)]
    reader = sequence(start + chunk, start, 500)
    work = fuse(prepare_prefill(reader, chunk, 1), prepare_decode(decoding, 1, {decoding[0]: 3}))
    step = work.step(BLOCK, CPU)
    size, count = chunk + more_tokens, len(rows)
    columns = max(step.block_table.shape[1], -(-(start + size) // BLOCK)) + more_columns
    padded = filled(work, PaddedShape(size, count + more_rows, columns))

    places = [*range(chunk), *range(size, size + count)]  # of the real tokens
    for name in ("token_ids", "positions", "slot_mapping"):
        assert getattr(padded, name)[places].tolist() == getattr(step, name).tolist(), name
    padding = sorted({*range(size + count + more_rows)} - {*places})
    assert set((padded.slot_mapping[padding] // BLOCK).tolist()) <= {SCRATCH}
    assert padded.positions.min() >= 0
    assert padded.positions.max() < MAX_CONTEXT
    assert padded.query_start.tolist() == [0, *range(size, size + count + more_rows + 1)]
    assert padded.seq_lens[0] == start + size <= columns * BLOCK
    assert padded.seq_lens[1 : count + 1].tolist() == step.seq_lens[1:].tolist()
    assert padded.seq_lens[count + 1 :].tolist() == [1] * more_rows
    held = step.block_table.shape[1]
    assert padded.block_table[: count + 1, :held].tolist() == step.block_table.tolist()
    for row, blocks in zip(padded.block_table.tolist(), [reader.blocks, *(s.blocks for s in decoding)], strict=False):
        assert set(row) == set(blocks[: len(row)])  # nobody else's
    assert (padded.block_table[count + 1 :] == SCRATCH).all()
    assert padded.logits_index[: count + 1].tolist() == [chunk - 1, *range(size, size + count)]
    assert padded.sources.tolist() == [3, *[KNOWN] * (count + more_rows - 1)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_phase_alone(phase):
    reader = sequence(7, 2, 0) if phase == "prefill" else sequence(7, 6, 0)
    work = prepare_prefill(reader, 5, 1) if phase == "prefill" else prepare_decode([reader], 1)
    shape = PaddedShape(8, 0, 4) if phase == "prefill" else PaddedShape(0, 2, 4)
    padded = filled(work, shape)
    assert padded.logits_index.tolist() == ([4] if phase == "prefill" else [0, 1])
    assert padded.token_ids.tolist()[: len(work.spans[0].tokens)] == list(work.spans[0].tokens)
    step = padded.step(BLOCK, torch.tensor([9, 8]))
    assert step.query_lens == ((8,) if phase == "prefill" else (1, 1))
    assert (step.carried is None) == (phase == "prefill")
    assert -7 not in padded.memory  # all of it is written


def test_padding_behind_the_last_position_stays_within_the_model():
    reader = sequence(MAX_CONTEXT, MAX_CONTEXT - 1, 0)
    padded = filled(prepare_prefill(reader, 1, 1), PaddedShape(8, 0, 12))
    assert padded.positions.tolist() == [MAX_CONTEXT - 1] * 8
    assert padded.slot_mapping.tolist() == [MAX_CONTEXT - 1, *[SCRATCH * BLOCK] * 7]


def test_ladder():
    assert ladder(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert ladder(1, 24) == [1, 2, 4, 8, 16, 24]
    assert ladder(64, 2048, 4) == [64, 256, 1024, 2048]
    assert ladder(8, 8) == [8]
