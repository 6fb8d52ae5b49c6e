"""The characters of a text as its tokens come, when tokens are single bytes: whole characters, up to the stop word that is complete first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nntask.data.tokenizer import ByteTokenizer
from wrappers.serve.pieces import TextPieces

LETTERS = st.text(alphabet="aé€😀b", max_size=12)
decode = ByteTokenizer().decode


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is shown of a text, and whether a word has stopped it."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(LETTERS, LETTERS, st.lists(st.text(alphabet="aé€😀b", min_size=1, max_size=4), max_size=3))
def test_pieces_of_characters_and_stop_words(prompt: str, text: str, stops: list[str]) -> None:
    """Characters and stop words that lie across tokens come whole or not at all, and what has been shown is never taken back."""
    pieces = TextPieces(decode, list(prompt.encode()), stops)
    want, is_stopped = expected(text, stops)
    shown = ""
    for token in text.encode():
        shown += pieces.add(token)
        assert want.startswith(shown)
        if pieces.is_stopped:
            break
    shown += "" if pieces.is_stopped else pieces.end()
    assert (shown, pieces.is_stopped) == (want, is_stopped)


@given(st.lists(st.sampled_from(list("aé€😀".encode())), max_size=12))
def test_bytes_that_are_no_characters(tokens: list[int]) -> None:
    """Are replaced as in the whole text."""
    pieces = TextPieces(decode, list(b"a"), [])
    assert "".join([*map(pieces.add, tokens), pieces.end()]) == decode(tokens)
