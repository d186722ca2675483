"""Text that every Python has: the language reference behind `help()`, some 65,000 words."""

import platform
from collections.abc import Iterator
from pydoc_data.topics import topics

from deepinfer_lab.errors import SettingError
from deepinfer_lab.model.tokenizer import Tokenizer


def reference_text() -> str:
    """All topics, in the order of their names. It differs a little between Python versions: record `text_version`."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def text_version() -> str:
    """What `reference_text` depends on."""
    return f"pydoc_data.topics of Python {platform.python_version()}"


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
