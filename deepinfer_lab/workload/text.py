"""Prompts cut from the reference text, or drawn."""

from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer_lab.errors import SettingError
from deepinfer_lab.model.reference_text import reference_text
from deepinfer_lab.model.tokenizer import Tokenizer


def prompts(tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """Endless prompts of exactly `length` tokens, cut from the text one after the other, all different until it wraps.

    Raises:
        SettingError: a length below 1 or beyond the text's.
    """
    tokens = tokenizer.encode(reference_text())
    if not 1 <= length <= len(tokens):
        raise SettingError(f"prompt length {length}: allowed are 1 to {len(tokens)} tokens, the length of the text")
    at = 0
    while True:
        if at + length > len(tokens):
            at = 0
        yield tokens[at : at + length]
        at += length


def random_token_ids(vocabulary: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """A prompt of each length, for models without a tokenizer or where which tokens does not matter; drawn uniformly."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, vocabulary, length).tolist() for length in lengths]
