"""Prompts cut from the text that every Python has."""

import itertools

import pytest

from deepinfer_lab.errors import SettingError
from deepinfer_lab.model import reference_text
from deepinfer_lab.workload import text


class Words:
    """A tokenizer with one token for each word: its place among the words."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count

    def encode(self, words: str) -> list[int]:
        return list(range(len(words.split()) if self.count is None else self.count))


def test_the_text_is_long_and_the_same_every_time():
    whole = text.reference_text()
    assert len(whole.split()) > 50_000
    assert whole == text.reference_text()


def test_the_version_names_its_python():
    assert "Python 3." in reference_text.text_version()


@pytest.mark.parametrize("length", [1, 7, 512])
def test_prompts_have_their_length_and_differ(length):
    prompts = list(itertools.islice(text.prompts(Words(), length), 60))
    assert {len(prompt) for prompt in prompts} == {length}
    assert len({tuple(prompt) for prompt in prompts}) == 60


def test_prompts_follow_each_other():
    prompts = itertools.islice(text.prompts(Words(10), 3), 3)
    assert list(prompts) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(("count", "length"), [(10, 3), (9, 3), (3, 3), (4, 3)])
def test_prompts_never_end_and_are_never_short(count, length):
    for prompt in itertools.islice(text.prompts(Words(count), length), 20):
        assert prompt == list(range(prompt[0], prompt[0] + length))


@pytest.mark.parametrize("length", [11, 0, -1])
def test_lengths_that_the_text_does_not_have(length):
    """A prompt that is shorter than asked for would spoil a measurement in silence."""
    with pytest.raises(SettingError, match=str(length)):
        next(text.prompts(Words(10), length))
