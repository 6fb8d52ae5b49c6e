"""Where texts may be cut: the tokens of the chunks are those of the whole, for the splitters of published tokenizers; others never cut."""

from __future__ import annotations

import numpy as np
import pytest
from support.splitters import PATTERNS, SPLITTERS, drawn_text, trained
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from nntask.data import seams
from nntask.data.seams import Seams
from nntask.data.split_rules import GPT_2, splits


@pytest.mark.parametrize("name", SPLITTERS)
def test_chunks_have_the_tokens_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn texts in pieces that end anywhere, even within a word: the ids of the chunks, one after another, are those of the text."""
    monkeypatch.setattr(seams, "_SEARCHED", 200)
    inner = trained(name)
    found = Seams.of(inner)
    num_chunks = 0
    for seed in range(30):
        text = drawn_text(100 + seed, 300)
        size = np.random.default_rng(seed).integers(20, 400)
        chunks = list(found.cut(text[at : at + size] for at in range(0, len(text), size)))
        num_chunks += len(chunks)
        whole = inner.encode(text, add_special_tokens=False).ids
        assert [i for chunk in chunks for i in inner.encode(chunk, add_special_tokens=False).ids] == whole, chunks
    assert num_chunks > 60, "seams were found"


UNKNOWN = {
    "a pattern that takes two words": (None, pre_tokenizers.Split(Regex(r"\w+ \w+|\s+"), "isolated"), None),
    "a pattern that looks back": (None, pre_tokenizers.Split(Regex(r"(?<=a)b| ?\p{L}+|\s+"), "isolated"), None),
    "a pattern that looks far ahead": (None, pre_tokenizers.Split(Regex(r"\p{L}+(?=.*x)|\s+"), "isolated"), None),
    "an anchor": (None, pre_tokenizers.Split(Regex(r"^\p{L}+|\s+"), "isolated"), None),
    "scripts": (None, pre_tokenizers.UnicodeScripts(), None),
    "pieces of a fixed length": (None, pre_tokenizers.FixedLength(5), None),
    "spaces that are cut off at the left": (normalizers.Strip(True, False), pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "a replaced pattern": (normalizers.Replace(Regex("a b"), "c"), pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "a prefix that is no space": (normalizers.Prepend("x"), None, None),
    "a token across words": (normalizers.Replace(" ", "▁"), None, {"a": 0, "▁": 1, "b": 2, "a▁": 3, "\n": 4, "\na": 5}),
    "a space without a token": (normalizers.Replace(" ", "▁"), None, {"a": 0, "b": 1}),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_proved_is_not_cut(case: str) -> None:
    """Such a tokenizer has no seams, and its texts stay whole."""
    normalizer, splitter, vocab = UNKNOWN[case]
    inner = Tokenizer(models.BPE(vocab=vocab or {"a": 0}, merges=[]))
    if normalizer is not None:
        inner.normalizer = normalizer
    if splitter is not None:
        inner.pre_tokenizer = splitter
    pieces = ["ab cd\nef " * 5000] * 3
    assert list(Seams.of(inner).cut(pieces)) == ["".join(pieces)]


def test_expressions_of_published_tokenizers_are_proved() -> None:
    """Both kinds of seams, for every one; the alternatives that may go across are told from those that do not."""
    for pattern in (GPT_2, *PATTERNS.values()):
        assert splits(pattern, "word", "space") is True
        assert splits(pattern, "line", "letter") is True
    assert splits(r"\p{N}{1,3}", "word", "space") is False  # it leaves letters and spaces together
    for pattern in (
        r"\S+\s*|\s+",
        r"\p{L}+ ?|\s+",
        r"[^x]+|\s+",
        r".+|\s+",
        r"\p{L}+\b|\s+",
        r"\s+(?!\S)|x",
        r"(ab )+|\s+",
        r"[ -~]+|\s+",
        r"\p{L}++|\s+",
    ):
        assert splits(pattern, "word", "space") is None, pattern
    for pattern in (r"\n?\p{L}+|\s+", r"\s\p{L}+|\s+", r"[^\p{N}]\p{L}+|\s+"):
        assert splits(pattern, "line", "letter") is None, pattern


def test_added_tokens_are_never_cut() -> None:
    """Neither inside, nor where one strips the spaces around it; a text of nothing else stays whole."""
    inner = trained("gpt2")
    inner.add_tokens([AddedToken("new york city", lstrip=True, rstrip=True, normalized=True)])
    text = ("in new york city it is new york city " + "again and " * 8) * 3000
    chunks = list(Seams.of(inner).cut(text[at : at + 7000] for at in range(0, len(text), 7000)))
    assert len(chunks) > 5
    assert [i for chunk in chunks for i in inner.encode(chunk).ids] == inner.encode(text).ids
    assert len(list(Seams.of(inner).cut(["new york city " * 2000] * 3))) == 1


def test_a_text_without_seams_is_joined_in_linear_time() -> None:
    """A line of 20 MB without a space is one part, whose pieces were looked at once each."""
    found = Seams.of(trained("gpt2"))
    assert [len(chunk) for chunk in found.cut(["x" * (1 << 20)] * 20)] == [20 << 20]
