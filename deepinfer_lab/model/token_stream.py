"""Token ids to text, one at a time, never splitting a character."""

import codecs
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from deepinfer_lab.errors import UnsupportedArchitecture


class TokenStream:
    """Turns token ids into text as they come. Each push costs time in the length of that token alone.

    A character whose bytes are spread over several tokens comes out whole with the last of them. Bytes that are not
    UTF-8 come out as U+FFFD, as soon as that is certain.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], leading_spaces: int) -> None:
        """`bytes_of` maps an id to its UTF-8 bytes; up to `leading_spaces` spaces are cut from the start of the text."""
        self._bytes_of = bytes_of
        self._to_strip = leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often empty."""
        return self._strip(self._utf8.decode(self._bytes_of(token_id)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, otherwise nothing."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


def byte_spelling(decoder: dict[str, Any] | None, source: str) -> tuple[Callable[[str], bytes], int]:
    """How a vocabulary spells bytes.

    Args:
        decoder: the `decoder` object of a tokenizer.json.
        source: the file's name, for messages.

    Returns:
        a function from a token's spelling to its bytes, and how many spaces to cut from the start of a text.

    Raises:
        UnsupportedArchitecture: neither byte-level, nor SentencePiece-like with byte fallback.
    """
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level_bytes, 0
    if "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        spaces = sum(step["start"] for step in steps if step["type"] == "Strip" and step["content"] == " ")
        replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
        return lambda token: _fallback_bytes(token, replacements), spaces
    raise UnsupportedArchitecture(
        f"{source}: decoder {sorted(kinds) or None}; supported are ByteLevel, and ByteFallback with Replace, Fuse and Strip"
    )


@cache
def _byte_of_character() -> Mapping[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:  # an added token, spelt in plain text
        return token.encode()


def _fallback_bytes(token: str, replacements: list[tuple[str, str]]) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # six characters that only look like a byte
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    return token.encode()
