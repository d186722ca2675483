"""Text as it comes, up to the first stop string, none of which is ever let out."""

from deepinfer_lab.model.token_stream import TokenStream


class StopText:
    """Turns token ids into text that is certain, and says when a stop string ended it.

    A request ends with the token that completes a stop string; no further token is awaited to see whether a longer one
    would follow. Of several that this token completes, the one that begins first counts, then the longest. Stop strings
    are looked for in the text that clients see: one that spells out a special token is never found.

    A push costs time in the length of its own text (and of what is held back, at most the longest stop string), for each
    stop string: of each, Knuth, Morris and Pratt (1977) keep the longest beginning that the text so far ends with.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    def __init__(self, stream: TokenStream, stop: tuple[str, ...], active_from: int = 0) -> None:
        """A stop string that is complete before `active_from` tokens were pushed is ordinary text.

        Args:
            stream: a fresh one, read by this object alone.
            stop: none of them empty.
            active_from: that token itself, counted from 1, may complete one.
        """
        assert all(stop)
        self.found: str | None = None
        self._stream, self._stop, self._active_from = stream, stop, active_from
        self._borders = [_borders(text) for text in stop]
        self._matched = [0] * len(stop)  # characters of each stop string that the text ends with, never all of them
        self._held = ""  # the end of the text that may yet become a stop string
        self._pushed = 0

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; nothing once a stop string was found."""
        self._pushed += 1
        return self._advance(self._stream.push(token_id))

    def flush(self) -> str:
        """What is left of a request that ended otherwise. A broken character at its end may still complete a stop string."""
        text = self._advance(self._stream.flush())
        held, self._held = self._held, ""
        return text + held

    def _advance(self, text: str) -> str:
        if self.found is not None:
            return ""
        pending = self._held + text
        complete = []  # (start in `pending`, -length, stop string), which sorts as they count
        for index, stop in enumerate(self._stop):
            matched, borders = self._matched[index], self._borders[index]
            for end, character in enumerate(text, len(self._held) + 1):
                while matched and stop[matched] != character:
                    matched = borders[matched]
                matched += stop[matched] == character
                if matched == len(stop):
                    complete.append((end - matched, -matched, stop))
                    matched = borders[matched]
            self._matched[index] = matched
        if complete and self._pushed >= self._active_from:
            start, _, self.found = min(complete)
            self._held = ""
            return pending[:start]
        certain = len(pending) - max(self._matched, default=0)
        self._held = pending[certain:]
        return pending[:certain]


def _borders(text: str) -> list[int]:
    """For each length, the longest shorter beginning of `text` with which its beginning of that length ends."""
    borders = [0, 0]
    for end in range(1, len(text)):
        border = borders[end]
        while border and text[border] != text[end]:
            border = borders[border]
        borders.append(border + (text[border] == text[end]))
    return borders
