"""Stop strings: found where they are, in any tokenisation, and never let out."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_lab.engine.stop_text import StopText
from deepinfer_lab.model.token_stream import TokenStream


def stop_text(tokens: Sequence[bytes], stop: Sequence[str], active_from: int = 0, spaces: int = 0) -> StopText:
    """Its token ids count through `tokens`."""
    return StopText(TokenStream(tokens.__getitem__, spaces), tuple(stop), active_from)


def run(tokens: Sequence[str | bytes], stop: Sequence[str], active_from: int = 0) -> tuple[list[str], str | None]:
    """What each push and then the flush gave, and the stop string."""
    spelt = [token.encode() if isinstance(token, str) else token for token in tokens]
    text = stop_text(spelt, stop, active_from)
    pieces = [text.push(i) for i in range(len(spelt))]
    return [*pieces, text.flush()], text.found


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string without being all of it."""
    begun = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    return max(begun, default=0)


def oracle(tokens: Sequence[bytes], stop: Sequence[str], active_from: int) -> tuple[list[str], str | None]:
    """Looks at the whole text again after every token."""
    pieces: list[str] = []
    before = ""
    for count in range(1, len(tokens) + 1):
        text = b"".join(tokens[:count]).decode(errors="ignore")  # all whole characters
        complete = [
            (start, -len(s), s)
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > len(before)
        ]
        told = len("".join(pieces))
        if complete and count >= active_from:
            start, _, found = min(complete)
            return [*pieces, text[told:start], *[""] * (len(tokens) - count + 1)], found
        pieces.append(text[told : len(text) - held_back(text, stop)])
        before = text
    return [*pieces, before[len("".join(pieces)) :]], None


def cut(text: str, places: Sequence[int]) -> list[bytes]:
    """The text's bytes as tokens, cut anywhere, also inside characters; a place that occurs twice gives an empty token."""
    whole = text.encode()
    places = sorted(min(place, len(whole)) for place in places)
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


@pytest.mark.parametrize("alphabet", ["ab", "aé", "é🙂"])
@given(data=st.data())
@settings(deadline=None, max_examples=400)
def test_equals_looking_at_the_whole_text(alphabet, data):
    tokens = cut(
        data.draw(st.text(alphabet, max_size=25)), data.draw(st.lists(st.integers(0, 50), max_size=20), label="cuts")
    )
    stop = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=6), max_size=4), label="stop")
    active_from = data.draw(st.integers(0, 12) | st.just(0), label="active_from")
    assert run(tokens, stop, active_from) == oracle(tokens, stop, active_from)


@given(text=st.text("ab", max_size=40), period=st.text("ab", min_size=1, max_size=3), repeats=st.integers(1, 5))
@example(text="aabaaabaab", period="aab", repeats=2)
@settings(deadline=None, max_examples=200)
def test_stop_strings_that_repeat_themselves(text, period, repeats):
    tokens = cut(text + period * repeats + text, range(1, 100))
    stop = [(period * repeats)[: len(period) * repeats - cut_off] or "a" for cut_off in range(3)]
    assert run(tokens, stop[:1]) == oracle(tokens, stop[:1], 0)
    assert run(tokens, stop) == oracle(tokens, stop, 0)


@pytest.mark.parametrize(
    ("tokens", "stop", "pieces", "found"),
    [
        (["a", "b", "c"], [], ["a", "b", "c", ""], None),
        (["a", "b", "c"], ["b"], ["a", "", "", ""], "b"),
        (["x<", "end", "> y"], ["<end>"], ["x", "", "", ""], "<end>"),
        (["x<", "end", "less"], ["<end>"], ["x", "", "<endless", ""], None),
        (["x<", "end"], ["<end>"], ["x", "", "<end"], None),
        (["<", "<", "<", "e"], ["<<e"], ["", "", "<", "", ""], "<<e"),
        (["a", "", "b"], ["ab"], ["", "", "", ""], "ab"),
        (["abc"], ["c", "bc", "b"], ["a", ""], "bc"),
        (["abc"], ["a", "abc", "ab"], ["", ""], "abc"),
        (["ab", "c"], ["b", "abc"], ["a", "", ""], "b"),  # ends at once, though the longer one would have followed
        (["a", "bc"], ["b", "abc"], ["", "", ""], "abc"),
        (["end"], ["end"], ["", ""], "end"),
        (["the end"], ["end", "end"], ["the ", ""], "end"),
        (["line\n", "\nnext"], ["\n\n"], ["line", "", ""], "\n\n"),
        ([b"caf\xc3", b"\xa9!"], ["é"], ["caf", "", ""], "é"),
        ([b"caf\xc3", b"\xa8!"], ["é"], ["caf", "è!", ""], None),
        ([b"\xf0\x9f", b"\x99", b"\x82\xf0\x9f\x99", b"\x82"], ["🙂🙂"], ["", "", "", "", ""], "🙂🙂"),
        ([b"a\xff", b"b"], ["\ufffdb"], ["a", "", ""], "\ufffdb"),
        ([b"a", b"\xc3"], ["xy"], ["a", "", "\ufffd"], None),
        ([b"ax", b"\xc3"], ["xy"], ["a", "", "x\ufffd"], None),
        ([b"ax", b"\xc3"], ["x\ufffd"], ["a", "", ""], "x\ufffd"),  # complete only when it is certain to stay broken
    ],
)
def test_examples(tokens, stop, pieces, found):
    assert run(tokens, stop) == (pieces, found)


@pytest.mark.parametrize(
    ("active_from", "pieces", "found"),
    [
        (0, ["", "", "", "", ""], "ab"),
        (2, ["", "", "", "", ""], "ab"),  # the token that completes it counts, not the one that begins it
        (3, ["", "ab", "", "", ""], "ab"),
        (4, ["", "ab", "", "", ""], "ab"),
        (5, ["", "ab", "", "ab", ""], None),
    ],
)
def test_not_before_so_many_tokens(active_from, pieces, found):
    assert run(["a", "b", "a", "b"], ["ab"], active_from) == (pieces, found)


def test_what_was_complete_too_early_does_not_count_later():
    """Held back as a part of "abc", the early "b" is still there to be looked at again."""
    assert run(["ab", "x"], ["b", "abc"], 2) == (["", "abx", ""], None)
    assert run(["ab", "c"], ["b", "abc"], 2) == (["", "", ""], "abc")
    assert run(["aa", "a"], ["aa"], 2) == (["a", "", ""], "aa")


def test_spaces_cut_from_the_start_are_no_text():
    text = stop_text([b" ", b" a"], [" a"], spaces=1)
    assert [text.push(0), text.push(1), text.found] == ["", "", " a"]
    text = stop_text([b" a"], [" a"], spaces=1)
    assert [text.push(0), text.flush(), text.found] == ["a", "", None]


def test_a_stop_string_is_found_as_soon_as_it_is_complete():
    text = stop_text([b"x", b"<e", b"nd", b">", b"more", b"\xc3"], ["<end>"])
    assert [(text.push(i), text.found) for i in range(6)] == [
        ("x", None), ("", None), ("", None), ("", "<end>"), ("", "<end>"), ("", "<end>"),
    ]  # fmt: skip
    assert text.flush() == ""


def test_each_push_looks_at_one_token_only():
    """Twenty thousand tokens against a long stop string that they almost complete with each."""
    reads = []

    def bytes_of(token_id: int) -> bytes:
        reads.append(token_id)
        return b"a"

    stop = "a" * 5000 + "b"
    text = StopText(TokenStream(bytes_of, 0), (stop,))
    pieces = [text.push(i) for i in range(20_000)]
    assert reads == list(range(20_000))
    assert pieces == [""] * 5000 + ["a"] * 15_000
    assert text.flush() == "a" * 5000
