r"""Tables of tokenizer rules that are known to be bounded: their time and memory are proportional to the length of a text.

The rules of a tokenizer.json (normalizer, pre-tokenizer, post-processor, decoder) are a program: replacements can multiply a text, and regular
expressions such as ``(a|aa)+$`` can try an exponential number of ways. A rule counts as bounded if it is in the tables below. A tokenizer with any
other rule may be harmless, but this is not proved, so it runs in a sandboxed process (`ConfinedRules`). Regular expressions are compared as text with
published ones; the only ones that are judged by their form are runs of one class of characters.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..gguf.pre_tokenizers import RULES

_MOST_GROWTH: Final = 16
"""Largest growth, in bytes per byte of text, of all steps on texts together, and of all steps on tokens together. LLaMA's rules grow a text 12 times:
a sign of three bytes is put before each part of a text, and replaces each space."""
_LONGEST_WORD: Final = 256
"""Largest number of characters of an addition to a word, and of a text that is searched for."""
_LONGEST_PREFIX: Final = 32
_LONGEST_PIECE: Final = 100
"""Largest number of characters of a token of a Unigram model, and of a word of a WordPiece model; their times are proportional to it. Published
models have 16 and 100."""
_LONGEST_FORM: Final = 36
"""Largest size in bytes of a replacement of a `Precompiled` normalizer. The longest compatibility form of Unicode has 33."""
_MOST_STEPS: Final = 32
_MOST_PIECES: Final = 16
_MOST_AROUND: Final = 256
"""Largest number of ids that a template puts around a text."""
_LONGEST_VALUE: Final = 1 << 14
"""Largest size in bytes of a token or a list of numbers. A Unigram model is a tree as deep as its longest token, and freeing a deep one overflows the
stack."""
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
"""Pattern of expressions with one class of characters, repeated or not, whose search needs no costly backtracking."""
_LEAST: Final = re.compile(r" \{([1-9]),\}")
"""Pattern of expressions for a run of spaces; its group is the smallest length of the run."""
_PLAIN: Final = frozenset(
    {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt"),
        *("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation", "UnicodeScripts", "CharDelimiterSplit"),
        *("RobertaProcessing", "BertProcessing", "ByteFallback", "Fuse"),
    }
)
"""Steps whose cost depends on no number or text in the file."""
_FORMS: Final[Mapping[str, int]] = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
"""Unicode form -> largest growth in bytes per byte. A text grows only once, so they count only after a step that has inserted characters."""
_ONCE: Final = (("ByteLevel", 0, 2), ("Precompiled", 0, 2), ("TemplateProcessing", 2, 3))
"""Steps that lengthen a text each time they are applied, as (type, first section, last section excluded): at most one of each is accepted."""
_LISTS: Final = ("normalizers", "pretokenizers", "processors", "decoders")
_SECTIONS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def unbounded_rule(content: Mapping[str, Any]) -> str:
    """Return the first rule in the sections of a tokenizer.json that is not known to be bounded, as text; "" if there is none."""
    by_section = {section: steps(content.get(section)) for section in _SECTIONS}
    growth = 1.0
    for section, found in by_section.items():
        if len(found) > _MOST_STEPS:
            return f"{len(found)} steps of {section}"
        growth = growth if section == "pre_tokenizer" else 1.0  # it works on the output of the normalizer
        for step in found:
            if not _is_bounded(step):
                return _as_text(step)
            growth *= _FORMS.get(str(step["type"]), 1) if growth > 1 else 1
            growth *= _growth(step)
            if growth > _MOST_GROWTH:
                return _as_text(step)
    for kind, first, last in _ONCE:
        if sum(step.get("type") == kind for section in _SECTIONS[first:last] for step in by_section[section]) > 1:
            return f"more than one {kind}"
    return ""


def unbounded_model(inner: Any) -> str:
    """Return the first property of the model of a `tokenizers.Tokenizer` that is not known to be bounded, as text; "" if there is none."""
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
        if (token.lstrip or token.rstrip) and not word.strip():  # the tokenizer searches to the end of the run from each of n spaces
            return f"an added token of {len(token.content)} spaces that takes those next to it"
    return ""


def has_long_value(text: bytes) -> bool:
    """Return whether a tokenizer.json has `_LONGEST_VALUE` bytes without a quotation mark, except in tables of its normalizer.

    The model, which is nearly all of the file, is not parsed.
    """
    half, quote = _LONGEST_VALUE // 2, re.compile(rb'(?<!\\)"')
    without = [at for at in range(0, len(text) - half + 1, half) if quote.search(text, at, at + half) is None]
    if not without:
        return False
    try:
        tables = [str(step.get("precompiled_charsmap")).encode() for step in steps(normalizer_of(text))]
    except (ValueError, RecursionError):  # not a tokenizer
        return True
    spans = [(begin, begin + len(table)) for table in tables if table and (begin := text.find(table)) >= 0]
    return any(not any(begin <= at and at + half <= end for begin, end in spans) for at in without)


def sections_of(inner: Any) -> dict[str, Any]:
    """Return the rules of a `tokenizers.Tokenizer` as the sections of its tokenizer.json."""
    return {section: _state_of(getattr(inner, section)) for section in _SECTIONS}


def without_rules(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json without its rules, truncation and padding."""
    return {**content, **dict.fromkeys((*_SECTIONS, "truncation", "padding"))}


def with_rules(content: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with the rules replaced by those of another one."""
    return {**content, **{section: rules.get(section) for section in _SECTIONS}}


def normalizer_of(text: bytes) -> Mapping[str, Any] | None:
    """Return the normalizer in a tokenizer.json, which already runs when the file is loaded, since it normalises added tokens.

    The model, which is nearly all of the file, is not parsed if it comes last.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: the text is nested too deeply.
    """
    size = 1 << 16
    while size < len(text):
        head = _before_model(text[:size].decode("utf-8", "ignore"))
        if head is not None:
            values, rest = head
            if text.find(b'"normalizer"', rest) < 0 and text.find(b"\\u00", rest) < 0:  # a second key, possibly escaped, would replace it
                normalizer: Mapping[str, Any] | None = values.get("normalizer")
                return normalizer
            break
        size *= 8
    whole = json.loads(text)
    return whole.get("normalizer") if isinstance(whole, Mapping) else None


def _before_model(text: str) -> tuple[dict[str, Any], int] | None:
    """Return the values of a JSON object before its key "model", and the offset of that key's value in bytes; None if the text ends before it."""
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


def steps(component: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a section of a tokenizer.json, with sequences flattened."""
    waiting, flat = [] if component is None else [component], list[Mapping[str, Any]]()
    while waiting:
        step = waiting.pop()
        inside = next((step[key] for key in _LISTS if key in step), None) if isinstance(step, Mapping) and step.get("type") == "Sequence" else None
        if isinstance(inside, list):
            waiting.extend(reversed(inside))
        else:
            flat.append(step if isinstance(step, Mapping) else {"type": str(step)})
    return flat


def _is_bounded(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    return kind in _PLAIN or (kind in _CHECKS and bool(_CHECKS[str(kind)](step)))


def _is_known(pattern: Any) -> bool:
    """Return whether the pattern of a step is a short text, or a regular expression that is known to be bounded."""
    if not isinstance(pattern, Mapping):
        return False
    regex = pattern.get("Regex")
    if isinstance(regex, str):
        return regex in _PUBLISHED or _RUN.fullmatch(regex) is not None
    return _is_short(pattern, "String") and pattern["String"] != ""


def _is_short(step: Mapping[str, Any], key: str) -> bool:
    return isinstance(step.get(key), str) and len(step[key]) <= _LONGEST_WORD


def _is_replaced(step: Mapping[str, Any], *keys: str) -> bool:
    """Return whether the texts that a decoder replaces are short and not empty; an empty one would occur at every character."""
    return all(_is_short(step, key) and step[key] != "" for key in keys)


def _is_bounded_template(step: Mapping[str, Any]) -> bool:
    """Return whether a template contains each text exactly once, and few tokens."""
    tokens = step.get("special_tokens")
    if not isinstance(tokens, Mapping):
        return False
    counts = {name: len(token.get("ids", ())) for name, token in tokens.items()}
    for name, texts in (("single", ["A"]), ("pair", ["A", "B"])):
        pieces = step.get(name)
        if not isinstance(pieces, list) or len(pieces) > _MOST_PIECES:
            return False
        sequences = [piece["Sequence"].get("id") for piece in pieces if isinstance(piece, Mapping) and isinstance(piece.get("Sequence"), Mapping)]
        if sorted(map(str, sequences)) != texts:
            return False
        names = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece, Mapping) and "SpecialToken" in piece]
        if sum(counts.get(each, 0) for each in names) > _MOST_AROUND:
            return False
    return True


def _is_bounded_charsmap(step: Mapping[str, Any]) -> bool:
    """Return whether no replacement in the table of a `Precompiled` normalizer is longer than `_LONGEST_FORM`."""
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
"""Growth of steps whose insertions are fixed: spaces around Chinese characters, letters for bytes, spaces between words. For `Precompiled` it is the
growth of common characters in published tables; a single character may become `_LONGEST_FORM` bytes."""


def _growth(step: Mapping[str, Any]) -> float:
    """Return the largest growth of a step, in bytes per byte. Texts between added tokens may have one character each."""
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
    """Return a step as JSON, cut after 100 characters."""
    text = json.dumps(step)
    return text if len(text) <= 100 else f"{text[:100]}..."
