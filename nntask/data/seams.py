"""Seams of a text: offsets at which it may be cut so that the chunks, encoded alone, have the tokens of the whole.

A tokenizer normalises a text, splits it (pre-tokenization), and encodes each piece alone. A seam is an offset at which every step of that tokenizer
treats the two sides independently. Two kinds are looked for: before a single space between two letters, and after a line feed between the end of a
word or sentence and a letter. For each kind and each step there is a rule below; if one of the steps has none, the tokenizer has no seams of that
kind, and a text is encoded whole. Text without a seam stays together however long it is.

Where the pieces of a tokenizer may go across a seam (SentencePiece's BPE has one piece, the text), none of its tokens may: merges make tokens only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from .rule_bounds import sections_of
from .split_rules import GPT_2, splits
from .tokenizer_keys import steps

Kind = Literal["space", "line"]
_LETTER: Final = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0131\u0134-\u013e\u0141-\u0148\u014a-\u017f\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0410-\u044f"
    "\u0561-\u0586\u05d0-\u05ea\u0621-\u063a\u0641-\u064a\u0905-\u0939\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
"""Letters that stay letters and never join a neighbour, whatever Unicode form a text is brought to."""
_END: Final = ".,;:!?)}\\]\"'\u3002\uff0c\u3001\uff01\uff1f\uff1b\uff1a\u300d\u300f\uff09"
_SEAMS: Final[Mapping[Kind, str]] = {"space": f"(?<=[{_LETTER}]) (?=[{_LETTER}])", "line": f"(?<=[{_LETTER}{_END}])\n(?=[{_LETTER}])"}
_MARKS: Final = "\u0300-\u036f\u093c\u3099\u309a"
"""Marks into which these letters may be taken apart."""
_METASPACE: Final = "\u2581"
_LOCAL: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"})
"""Normalizers that take a character at a time, or one and its combining marks."""
_LOCAL_AT_SPACES: Final = frozenset({"Nmt", "Precompiled"})
"""Normalizers that turn line feeds into spaces."""
_WORDS: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_SEARCHED: Final = 1 << 14
"""Characters at the end of a text that are searched for a seam at once."""


@dataclass(frozen=True, slots=True)
class Seams:
    """The seams of the texts of one tokenizer.

    Args:
        pattern: places that may be seams; None if there are none.
        drops_space: whether the space after a seam is left out, since the tokenizer puts one before every text.
        near: (regular expression, normalizer, characters) to find added tokens within so many characters of a seam, where there may be none.
    """

    pattern: re.Pattern[str] | None
    drops_space: bool
    near: tuple[tuple[re.Pattern[str], Any, int], ...] = ()

    @classmethod
    def of(cls, inner: Any) -> Seams:
        """Return the seams of a `tokenizers.Tokenizer`."""
        sections = sections_of(inner)
        normalizers, splitters = steps(sections["normalizer"], "normalizers"), steps(sections["pre_tokenizer"], "pretokenizers")
        kinds = [kind for kind in _SEAMS if _is_seam(kind, normalizers, splitters, inner)]
        if not kinds:
            return cls(None, False)
        return cls(re.compile("|".join(_SEAMS[kind] for kind in kinds)), any(each["type"] == "Prepend" for each in normalizers), _near(inner))

    def cut(self, pieces: Iterable[str]) -> Iterator[str]:
        """Cut a text at seams.

        Args:
            pieces: the text in pieces that end anywhere.

        Yields:
            Chunks of the text to encode alone, about as long as the pieces.
        """
        waiting: list[str] = []
        for piece in pieces:
            text = waiting.pop() + piece if waiting and len(waiting[-1]) < _SEARCHED else piece
            cut = self._last(text)
            if cut is None:
                waiting.append(text)
                continue
            yield "".join((*waiting, text[:cut]))
            waiting = [text[cut + 1 if self.drops_space and text[cut] == " " else cut :]]
        if waiting:
            yield "".join(waiting)

    def _last(self, text: str) -> int | None:
        """The last seam of a text that is far enough from both ends; None if it has none."""
        if self.pattern is None:
            return None
        margin = max((size for _, _, size in self.near), default=1)
        end = len(text) - margin
        while end > margin:
            begin = max(end - _SEARCHED, margin)
            for match in reversed(list(self.pattern.finditer(text, begin, end))):
                cut = match.start() if match[0] == " " else match.end()
                if not any(_finds(each, text, cut) for each in self.near):
                    return cut
            end = begin
        return None


def _finds(near: tuple[re.Pattern[str], Any, int], text: str, cut: int) -> bool:
    """Whether an added token may be near a seam."""
    pattern, normalizer, size = near
    window = text[max(cut - size, 0) : cut + size]
    return pattern.search(window if normalizer is None else normalizer.normalize_str(window)) is not None


def _near(inner: Any) -> tuple[tuple[re.Pattern[str], Any, int], ...]:
    """Expressions for added tokens: those of the text as it is, and those of the normalised text."""
    added = inner.get_added_tokens_decoder().values()
    if not added:
        return ()
    size = 2 * max(len(token.content) for token in added) + 2
    found = [(re.compile("|".join(re.escape(token.content) for token in added)), None, size)]
    if inner.normalizer is not None and (some := [token.content for token in added if token.normalized]):
        contents = {inner.normalizer.normalize_str(content) for content in some} - {""}
        found.append((re.compile("|".join(map(re.escape, contents))), inner.normalizer, size))
    return tuple(found)


def _is_seam(kind: Kind, normalizers: list[dict[str, Any]], splitters: list[dict[str, Any]], inner: Any) -> bool:
    """Whether places of a kind are seams."""
    if not all(_normalizes_apart(kind, step, normalizers) for step in normalizers):
        return False
    is_replaced = any(_replaces_space(step) for step in normalizers)
    found = [_splits_apart(kind, step, is_replaced) for step in splitters]
    if None in found:
        return False
    if any(found):
        return True
    is_replaced = is_replaced or any(step["type"] == "Metaspace" for step in splitters)
    return _merges_apart(inner, _METASPACE if is_replaced else " ", kind) and not any(step["type"] == "ByteLevel" for step in splitters)


def _replaces_space(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer writes spaces as SentencePiece does."""
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _METASPACE)


def _normalizes_apart(kind: Kind, step: Mapping[str, Any], others: list[dict[str, Any]]) -> bool:
    """Whether a normalizer treats both sides of a seam alone as it treats the whole.

    Args:
        others: all normalizers of the tokenizer.
    """
    name = step["type"]
    if name in _LOCAL or (name in _LOCAL_AT_SPACES and kind == "space"):
        return True
    if name == "Prepend":
        return bool(kind == "space" and step["prepend"] == _METASPACE and any(map(_replaces_space, others)))
    if name == "Strip":
        return kind == "space" and not step["strip_left"]
    if name != "Replace":
        return False
    text = step["pattern"].get("String")
    if text is None:
        return bool(step["pattern"].get("Regex") == " {2,}")
    return _replaces_space(step) or not any(char.isspace() or char.isalpha() for char in text)


def _splits_apart(kind: Kind, step: Mapping[str, Any], is_replaced: bool) -> bool | None:
    """What a pre-tokenizer does at a seam: True if a piece ends there, False if one may go across, None if nothing is known.

    Args:
        is_replaced: whether the normalizers write spaces as SentencePiece does.
    """
    name = step["type"]
    if name == "Metaspace":
        return None if kind == "line" or step["replacement"] != _METASPACE else bool(step["split"])
    if name == "Split" and step["pattern"].get("String") == " ":
        behavior = step["behavior"]
        return False if is_replaced or kind == "line" or behavior not in ("Isolated", "Removed", "MergedWithNext") else not step["invert"] or None
    if is_replaced:
        return None  # the rules below are about spaces
    if name == "ByteLevel":
        if kind == "line" and step["add_prefix_space"]:
            return None
        return _by_pattern(kind, GPT_2) if step.get("use_regex", True) else False
    if name in _WORDS:
        return True
    if name in ("Digits", "Punctuation"):
        return False
    if name == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return _by_pattern(kind, step["pattern"]["Regex"])
    return None


def _by_pattern(kind: Kind, pattern: str) -> bool | None:
    return splits(pattern, "word", "space") if kind == "space" else splits(pattern, "line", "letter")


def _merges_apart(inner: Any, space: str, kind: Kind) -> bool:
    """Whether no token of a BPE goes across a seam, so that no merge does."""
    model = inner.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return False
    vocab = inner.get_vocab(with_added_tokens=False)
    mark = space if kind == "space" else "\n"
    if mark not in vocab and not (model.byte_fallback and f"<0x{ord(mark):02X}>" in vocab):
        return False
    crosses = re.compile(f"[\\w{_MARKS}]{space}" if kind == "space" else r"\n\w")
    return not any(crosses.search(token) for token in vocab)
