"""Seams of a text: offsets at which it can be cut so that the chunks, encoded separately, have the tokens of the whole text.

A tokenizer normalises a text, splits it into pieces (pre-tokenization), and encodes each piece alone. A seam is an offset at which every step of the
tokenizer treats the two sides independently. Two kinds are considered: before a single space between two letters, and after a line feed between the
end of a word or sentence and a letter. For each kind and each step there is a rule below. If any step has no rule, the tokenizer has no seams of that
kind, and texts are encoded whole. Text without a seam is never cut, regardless of its length.

If a piece may extend across a seam (SentencePiece's BPE has the whole text as one piece), no token of the vocabulary may: merges only produce tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from .rule_bounds import sections_of, steps
from .split_rules import GPT_2, splits

Kind = Literal["space", "line"]
_LETTER: Final = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0131\u0134-\u013e\u0141-\u0148\u014a-\u017f\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0410-\u044f"
    "\u0561-\u0586\u05d0-\u05ea\u0621-\u063a\u0641-\u064a\u0905-\u0939\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
"""Letters that remain letters and never combine with a neighbour in any Unicode normalisation form."""
_END: Final = ".,;:!?)}\\]\"'\u3002\uff0c\u3001\uff01\uff1f\uff1b\uff1a\u300d\u300f\uff09"
_SEAMS: Final[Mapping[Kind, str]] = {"space": f"(?<=[{_LETTER}]) (?=[{_LETTER}])", "line": f"(?<=[{_LETTER}{_END}])\n(?=[{_LETTER}])"}
_MARKS: Final = "\u0300-\u036f\u093c\u3099\u309a"
"""Combining marks that occur in decompositions of these letters."""
_METASPACE: Final = "\u2581"
_LOCAL: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"})
"""Normalizers that process one character at a time, with its combining marks."""
_LOCAL_AT_SPACES: Final = frozenset({"Nmt", "Precompiled"})
"""Normalizers that are local at spaces only, because they turn line feeds into spaces."""
_WORDS: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_SEARCHED: Final = 1 << 14
"""Number of characters that are searched for a seam at a time, from the end of a text."""


@dataclass(frozen=True, slots=True)
class Seams:
    """Finder of seams in the texts of one tokenizer.

    Args:
        pattern: expression that matches candidates for seams; None if the tokenizer has no seams.
        drops_space: whether the space after a seam is dropped, because the tokenizer puts a space before every text.
        near: (regular expression, normalizer, distance) for added tokens: none may occur within this number of characters of a seam.
    """

    pattern: re.Pattern[str] | None
    drops_space: bool
    near: tuple[tuple[re.Pattern[str], Any, int], ...] = ()

    @classmethod
    def of(cls, inner: Any) -> Seams:
        """Return the finder of seams for a `tokenizers.Tokenizer`."""
        sections = sections_of(inner)
        normalizers, splitters = steps(sections["normalizer"]), steps(sections["pre_tokenizer"])
        kinds = [kind for kind in _SEAMS if _is_seam(kind, normalizers, splitters, inner)]
        if not kinds:
            return cls(None, False)
        return cls(re.compile("|".join(_SEAMS[kind] for kind in kinds)), any(each["type"] == "Prepend" for each in normalizers), _near(inner))

    def cut(self, pieces: Iterable[str]) -> Iterator[str]:
        """Cut a text at seams; it comes in pieces that may end anywhere.

        Yields:
            Chunks of the text to encode separately, about as long as the pieces.
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
        """Return the last seam of a text that is far enough from both ends; None if there is none."""
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
    """Return whether an added token may be near a seam."""
    pattern, normalizer, size = near
    window = text[max(cut - size, 0) : cut + size]
    return pattern.search(window if normalizer is None else normalizer.normalize_str(window)) is not None


def _near(inner: Any) -> tuple[tuple[re.Pattern[str], Any, int], ...]:
    """Return the expressions for added tokens, one for the text itself and one for the normalised text."""
    added = inner.get_added_tokens_decoder().values()
    if not added:
        return ()
    size = 2 * max(len(token.content) for token in added) + 2
    expressions = [(re.compile("|".join(re.escape(token.content) for token in added)), None, size)]
    if inner.normalizer is not None and (some := [token.content for token in added if token.normalized]):
        contents = {inner.normalizer.normalize_str(content) for content in some} - {""}
        expressions.append((re.compile("|".join(map(re.escape, contents))), inner.normalizer, size))
    return tuple(expressions)


def _is_seam(kind: Kind, normalizers: list[Mapping[str, Any]], splitters: list[Mapping[str, Any]], inner: Any) -> bool:
    """Return whether candidates of a kind are seams."""
    if not all(_normalizes_apart(kind, step, normalizers) for step in normalizers):
        return False
    is_replaced = any(_replaces_space(step) for step in normalizers)
    apart = [_splits_apart(kind, step, is_replaced) for step in splitters]
    if None in apart:
        return False
    if any(apart):
        return True
    is_replaced = is_replaced or any(step["type"] == "Metaspace" for step in splitters)
    return _merges_apart(inner, _METASPACE if is_replaced else " ", kind) and not any(step["type"] == "ByteLevel" for step in splitters)


def _replaces_space(step: Mapping[str, Any]) -> bool:
    """Return whether a normalizer replaces spaces as SentencePiece does."""
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _METASPACE)


def _normalizes_apart(kind: Kind, step: Mapping[str, Any], others: list[Mapping[str, Any]]) -> bool:
    """Return whether a normalizer, one of `others`, gives the same result for the two sides of a seam separately as for the whole text."""
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
    """Return whether a pre-tokenizer ends a piece at a seam: True if always, False if a piece may extend across it, None if unknown.

    Args:
        kind: kind of the seam.
        step: the pre-tokenizer.
        is_replaced: whether the normalizers replace spaces as SentencePiece does.
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
    """Return whether no token of a BPE extends across a seam, so that no merge does; `space` represents a space in its tokens."""
    model = inner.model
    if type(model).__name__ != "BPE" or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return False
    vocab = inner.get_vocab(with_added_tokens=False)
    mark = space if kind == "space" else "\n"
    if mark not in vocab and not (model.byte_fallback and f"<0x{ord(mark):02X}>" in vocab):
        return False
    crosses = re.compile(f"[\\w{_MARKS}]{space}" if kind == "space" else r"\n\w")
    return not any(crosses.search(token) for token in vocab)
