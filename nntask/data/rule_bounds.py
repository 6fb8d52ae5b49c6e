r"""Rules of tokenizers that are known to be bounded: their time and memory follow the length of a text.

The rules of a tokenizer.json (normalizer, pre-tokenizer, post-processor, decoder) are a program: replacements multiply a text, and regular
expressions such as ``(a|aa)+$`` try an exponential number of ways. A rule is bounded if it is in the tables below. Others may be harmless, but that
is not proved, so its tokenizer works in a confined process (`ConfinedRules`). Regular expressions are compared as text with published ones; the only
ones that are judged by their form are runs of one class of characters.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ..gguf.pre_tokenizers import RULES

_MOST_GROWTH: Final = 16
"""Most bytes that all steps on texts, or all steps on tokens, may make of one byte. LLaMA's rules make 12: a sign of three bytes is put before each
part of a text, and replaces each space."""
_LONGEST_WORD: Final = 256
"""Longest addition to a word, and longest text that is searched for."""
_LONGEST_PREFIX: Final = 32
_LONGEST_PIECE: Final = 100
"""Longest token of a Unigram model, and longest word of a WordPiece model, whose times are proportional to it. Published ones have 16 and 100."""
_LONGEST_FORM: Final = 36
"""Bytes of the longest text of a `Precompiled` normalizer. The longest compatibility form of Unicode has 33."""
_MOST_STEPS: Final = 32
_MOST_PIECES: Final = 16
_MOST_AROUND: Final = 256
"""Most ids that a template puts around a text."""
_LONGEST_VALUE: Final = 1 << 14
"""Bytes of a token or a list of numbers. A Unigram model is a tree as deep as its longest token, and freeing a deep one overflows the stack."""
_PUBLISHED: Final = frozenset(
    {
        *(pattern for rule in RULES for pattern in rule.patterns if "(?=" not in pattern),  # looks ahead from each digit to the last one
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",  # CLIP
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",  # CLIP
        r"\w+|[^\w\s]+",  # `Whitespace`
    }
)
"""Regular expressions of published tokenizers."""
_RUN: Final = re.compile(r"(?:\\[sSdDwWrnt]|\\[pP]\{\w+\}|[^\\\[\](){}|*+?.^$]|\[\^?(?:\\.(?:\{\w+\})?|[^\\\[\]])+\])(?:\+|\{[1-9],?[1-9]?\})?")
"""One class of characters, repeated or not, which is searched without a step back that matters."""
_LEAST: Final = re.compile(r" \{([1-9]),\}")
"""The least number of spaces that a run of them has."""
_PLAIN: Final = frozenset(
    {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt"),
        *("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation", "UnicodeScripts", "CharDelimiterSplit"),
        *("RobertaProcessing", "BertProcessing", "ByteFallback", "Fuse"),
    }
)
"""Steps without numbers and texts of their own."""
_FORMS: Final[Mapping[str, int]] = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
"""Most bytes that Unicode's forms make of a byte. They do so once, so they count only where a step before them has made characters of its own."""
_ONCE: Final = (("ByteLevel", 0, 2), ("Precompiled", 0, 2), ("TemplateProcessing", 2, 3))
"""Steps that lengthen a text each time, and the sections in which they do."""
_LISTS: Final = ("normalizers", "pretokenizers", "processors", "decoders")
_SECTIONS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def unbounded_rule(content: Mapping[str, Any]) -> str:
    """Return the first rule of a tokenizer.json that is not known to be bounded, as text; "" if there is none.

    Args:
        content: the sections of a tokenizer.json: normalizer, pre_tokenizer, post_processor, decoder.
    """
    steps = {section: list(_flat(content.get(section))) for section in _SECTIONS}
    growth = 1.0
    for section, found in steps.items():
        if len(found) > _MOST_STEPS:
            return f"{len(found)} steps of {section}"
        growth = growth if section == "pre_tokenizer" else 1.0  # which works on the output of the normalizer
        for step in found:
            if not _is_bounded(step):
                return _as_text(step)
            growth *= _FORMS.get(str(step["type"]), 1) if growth > 1 else 1
            growth *= _growth(step)
            if growth > _MOST_GROWTH:
                return _as_text(step)
    for kind, first, last in _ONCE:
        if sum(step.get("type") == kind for section in _SECTIONS[first:last] for step in steps[section]) > 1:
            return f"more than one {kind}"
    return ""


def unbounded_model(inner: Any) -> str:
    """Return what of a tokenizer's model is not known to be bounded, as text; "" if there is nothing.

    Args:
        inner: a `tokenizers.Tokenizer`.
    """
    model, name = inner.model, type(inner.model).__name__
    for attribute in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if len(getattr(model, attribute, None) or "") > (_LONGEST_WORD if attribute == "unk_token" else _LONGEST_PREFIX):
            return f"{attribute} of {len(getattr(model, attribute))} characters"
    if name == "WordPiece" and model.max_input_chars_per_word > _LONGEST_PIECE:
        return f"words of {model.max_input_chars_per_word} characters"
    if name == "Unigram" and (longest := max(map(len, inner.get_vocab(with_added_tokens=False)), default=0)) > _LONGEST_PIECE:
        return f"a token of {longest} characters"
    for token in inner.get_added_tokens_decoder().values():
        is_normal = token.normalized and inner.normalizer is not None
        word = inner.normalizer.normalize_str(token.content) if is_normal else token.content
        if (token.lstrip or token.rstrip) and not word.strip():  # each of n spaces is followed to the end of the run
            return f"an added token of {len(token.content)} spaces that takes those next to it"
    return ""


def has_long_value(text: bytes) -> bool:
    """Return whether a tokenizer.json has `_LONGEST_VALUE` bytes without a quotation mark, except in tables of its normalizer.

    The model, nearly all of the file, is not parsed.
    """
    half, quote = _LONGEST_VALUE // 2, re.compile(rb'(?<!\\)"')
    without = [at for at in range(0, len(text) - half + 1, half) if quote.search(text, at, at + half) is None]
    if not without:
        return False
    try:
        tables = [str(step.get("precompiled_charsmap")).encode() for step in _flat(normalizer_of(text))]
    except (ValueError, RecursionError):  # no tokenizer
        return True
    spans = [(begin, begin + len(table)) for table in tables if table and (begin := text.find(table)) >= 0]
    return any(not any(begin <= at and at + half <= end for begin, end in spans) for at in without)


def sections_of(inner: Any) -> dict[str, Any]:
    """Return the rules of a `tokenizers.Tokenizer` as the sections of its tokenizer.json."""
    return {section: _state_of(getattr(inner, section)) for section in _SECTIONS}


def without_rules(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with its tokens alone."""
    return {**content, **dict.fromkeys((*_SECTIONS, "truncation", "padding"))}


def with_rules(content: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with the rules of another one."""
    return {**content, **{section: rules.get(section) for section in _SECTIONS}}


def normalizer_of(text: bytes) -> Mapping[str, Any] | None:
    """Return the normalizer in a tokenizer.json, which works already while the file is loaded, as it brings added tokens to its form.

    The model, nearly all of the file, is not parsed if it comes last.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    size = 1 << 16
    while size < len(text):
        found = _before_model(text[:size].decode("utf-8", "ignore"))
        if found is not None:
            values, rest = found
            if text.find(b'"normalizer"', rest) < 0 and text.find(b"\\u00", rest) < 0:  # a second one would replace the first, also in other letters
                normalizer: Mapping[str, Any] | None = values.get("normalizer")
                return normalizer
            break
        size *= 8
    whole = json.loads(text)
    return whole.get("normalizer") if isinstance(whole, Mapping) else None


def _before_model(text: str) -> tuple[dict[str, Any], int] | None:
    """Return the values of an object before its key "model", and the number of bytes before that key's value; None if the text does not reach it."""
    decode, space = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")

    def after(sign: str, position: int) -> int:
        position = space.match(text, position).end()  # type: ignore[union-attr]
        if not text.startswith(sign, position):
            raise ValueError(sign)
        return space.match(text, position + 1).end()  # type: ignore[union-attr]

    values: dict[str, Any] = {}
    try:
        position = after("{", 0)
        while True:
            key, position = decode(text, position)
            position = after(":", position)
            if key == "model":
                return values, len(text[:position].encode())
            values[key], position = decode(text, position)
            position = after(",", position)
    except (ValueError, RecursionError):
        return None


def _flat(component: Any) -> Iterable[Mapping[str, Any]]:
    """The steps of a component, sequences resolved."""
    waiting = [] if component is None else [component]
    while waiting:
        step = waiting.pop()
        inside = next((step[key] for key in _LISTS if key in step), None) if isinstance(step, Mapping) and step.get("type") == "Sequence" else None
        if isinstance(inside, list):
            waiting.extend(reversed(inside))
        else:
            yield step if isinstance(step, Mapping) else {"type": str(step)}


def _is_bounded(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    return kind in _PLAIN or (kind in _CHECKS and bool(_CHECKS[str(kind)](step)))


def _is_known(pattern: Any) -> bool:
    """Whether the pattern of a step is a text, or a regular expression that is known."""
    if not isinstance(pattern, Mapping):
        return False
    regex = pattern.get("Regex")
    if isinstance(regex, str):
        return regex in _PUBLISHED or _RUN.fullmatch(regex) is not None
    return _is_short(pattern, "String") and pattern["String"] != ""


def _is_short(step: Mapping[str, Any], key: str) -> bool:
    return isinstance(step.get(key), str) and len(step[key]) <= _LONGEST_WORD


def _is_replaced(step: Mapping[str, Any], *keys: str) -> bool:
    """Whether a decoder replaces texts that are not empty; an empty one occurs at each character."""
    return all(_is_short(step, key) and step[key] != "" for key in keys)


def _is_bounded_template(step: Mapping[str, Any]) -> bool:
    """Whether a template has each text once, and few tokens."""
    tokens = step.get("special_tokens")
    if not isinstance(tokens, Mapping):
        return False
    counts = {name: len(token.get("ids", ())) for name, token in tokens.items()}
    for name, texts in (("single", ["A"]), ("pair", ["A", "B"])):
        pieces = step.get(name)
        if not isinstance(pieces, list) or len(pieces) > _MOST_PIECES:
            return False
        found = [piece["Sequence"].get("id") for piece in pieces if isinstance(piece, Mapping) and isinstance(piece.get("Sequence"), Mapping)]
        if sorted(map(str, found)) != texts:
            return False
        names = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece, Mapping) and "SpecialToken" in piece]
        if sum(counts.get(each, 0) for each in names) > _MOST_AROUND:
            return False
    return True


def _is_bounded_charsmap(step: Mapping[str, Any]) -> bool:
    """Whether the table of a `Precompiled` normalizer makes no character longer than Unicode's own forms do."""
    try:
        table = base64.b64decode(str(step.get("precompiled_charsmap")))
    except (binascii.Error, ValueError):
        return False
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0) <= _LONGEST_FORM


_CHECKS: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    "Strip": lambda step: all(type(step.get(key, 0)) is not int or step.get(key, 0) <= _LONGEST_WORD for key in ("start", "stop")),
    "Prepend": lambda step: _is_short(step, "prepend"),
    "Replace": lambda step: _is_known(step.get("pattern")) and _is_short(step, "content"),
    "Precompiled": _is_bounded_charsmap,
    "ByteLevel": lambda _: True,
    "Metaspace": lambda step: _is_short(step, "replacement"),
    "Split": lambda step: _is_known(step.get("pattern")),
    "FixedLength": lambda step: type(step.get("length")) is int and step["length"] > 0,
    "TemplateProcessing": _is_bounded_template,
    "WordPiece": lambda step: _is_short(step, "prefix"),
    "BPEDecoder": lambda step: _is_replaced(step, "suffix"),
    "CTC": lambda step: _is_replaced(step, "pad_token", "word_delimiter_token"),
}


_GROWTHS: Final[Mapping[str, int]] = {"Precompiled": 2, "BertNormalizer": 2, "ByteLevel": 2, "WordPiece": 2}
"""Growth of steps whose texts are fixed: spaces around Chinese characters, letters for bytes, spaces between words. For `Precompiled` it is that of
common characters in published tables; a single character may become `_LONGEST_FORM` bytes."""


def _growth(step: Mapping[str, Any]) -> float:
    """Return the largest number of bytes that a step makes of a byte; texts between added tokens may have one character each."""
    kind = step["type"]
    if kind == "Metaspace":
        nbytes = len(str(step.get("replacement")).encode())
        return max(nbytes, 1) + (step.get("prepend_scheme") != "never")
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode())
    if kind == "Replace":
        pattern, least = step["pattern"], _LEAST.fullmatch(step["pattern"].get("Regex", ""))
        length = len(pattern["String"].encode()) if "String" in pattern else int(least[1]) if least else 1
        return max(len(step["content"].encode()) / length, 1)
    return _GROWTHS.get(kind, 1)


def _state_of(component: Any) -> Any:
    return None if component is None else json.loads(component.__getstate__())


def _as_text(step: Mapping[str, Any]) -> str:
    """A step, shortened."""
    text = json.dumps(step)
    return text if len(text) <= 100 else f"{text[:100]}..."
