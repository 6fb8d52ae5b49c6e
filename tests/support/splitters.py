"""Tokenizers with the normalizers and pre-tokenizers of published models, trained on a small mixed text, and texts that are hard to cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

_SHORT: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS: Final = {
    "llama3": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST,
    "qwen2": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST,
    "qwen3.5": _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _REST,
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST,
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _REST,
    "deepseek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + _REST,
}
"""Expressions of published tokenizer.json files."""
WORDS: Final = (
    *("the", "cat", "Straße", "don't", "DON'T", "x1", "12345", "f(x)", "--", "//", "…", "Ærø", "naïve", "e\u0301te\u0301", "ﬁn", "ŀ", "Ⅷ", "I'll"),
    *(
        "中文",
        "字。",
        "かな",
        "カ\u3099",
        "한국어",
        "नमस्ते",
        "שלום",
        "العربية",
        "ไทย",
        "🙂",
        "👩\u200d👩",
        "\u00a0",
        "\u3000",
        "¨",
        "<x>",
        "extra",
        "▁",
        "a▁b",
        "_",
    ),
)
SPACES: Final = (" ", " ", " ", " ", "  ", "\n", "\n", "\n\n", "\r\n", "\t", " \n", "\n    ", "\n ", "", "   ")


def drawn_text(seed: int, size: int) -> str:
    """A text of words of many scripts with all kinds of white space between them."""
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(size))


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _level(*, prefix: bool = False, regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def _bpe(**more: Any) -> Tokenizer:
    return Tokenizer(models.BPE(unk_token=more.pop("unk", None), **more))


def _metaspace(scheme: str, *, split: bool) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def _with(inner: Tokenizer, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    if normalizer is not None:
        inner.normalizer = normalizer
    if splitter is not None:
        inner.pre_tokenizer = splitter
    return inner


def _sentence_piece(prefix: bool) -> Tokenizer:
    steps = [normalizers.Prepend("▁")] if prefix else []
    return _with(_bpe(unk="<unk>", byte_fallback=True, fuse_unk=True), normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")]))


def _unigram(splitter: Any) -> Tokenizer:
    steps = [normalizers.NFKC(), normalizers.Strip(False, True), normalizers.Replace(Regex(" {2,}"), " ")]
    return _with(Tokenizer(models.Unigram()), normalizers.Sequence(steps), splitter)


SPLITTERS: Final[dict[str, Callable[[], Tokenizer]]] = {
    "gpt2": lambda: _with(_bpe(), None, _level(regex=True)),
    "gpt2 prefix": lambda: _with(_bpe(), None, _level(prefix=True, regex=True)),
    "smollm": lambda: _with(_bpe(), None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _level(regex=True)])),
    **{name: (lambda p=p: _with(_bpe(), None, pre_tokenizers.Sequence([_split(p), _level()]))) for name, p in PATTERNS.items()},
    "qwen2 nfc": lambda: _with(_bpe(), normalizers.NFC(), pre_tokenizers.Sequence([_split(PATTERNS["qwen2"]), _level()])),
    "deepseek steps": lambda: _with(
        _bpe(), None, pre_tokenizers.Sequence([_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(PATTERNS["deepseek"]), _level()])
    ),
    "llama2": lambda: _sentence_piece(True),
    "gemma": lambda: _with(_sentence_piece(False), None, pre_tokenizers.Split(" ", "merged_with_previous")),
    "mistral": lambda: _with(_bpe(unk="<unk>", byte_fallback=True, fuse_unk=True), None, _metaspace("first", split=False)),
    "t5": lambda: _unigram(_metaspace("always", split=True)),
    "xlm-roberta": lambda: _unigram(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), _metaspace("always", split=True)])),
    "bert": lambda: _with(Tokenizer(models.WordPiece(unk_token="<unk>")), normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "lower": lambda: _with(
        _bpe(), normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]), _level(regex=True)
    ),
}
"""Name -> an untrained tokenizer."""


def trained(name: str) -> Tokenizer:
    """A tokenizer of `SPLITTERS` with about 600 tokens and some added ones, which strip spaces, or are matched in normalised text."""
    return Tokenizer.from_str(_trained(name))


@cache
def _trained(name: str) -> str:
    inner = SPLITTERS[name]()
    kind = type(inner.model).__name__
    text = [drawn_text(seed, 400) for seed in range(20)]
    special = ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in str(inner.pre_tokenizer) else []
    if kind == "Unigram":
        trainer: Any = trainers.UnigramTrainer(vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False)
    elif kind == "WordPiece":
        trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    else:
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, max_token_length=12, show_progress=False)
    words = [
        name.startswith("gemma") * " " + part for each in text for part in each.split(" ") if "▁" not in part
    ]  # so that no token goes across words
    inner.train_from_iterator(words if kind == "BPE" and not alphabet else text, trainer=trainer)
    inner.add_tokens([AddedToken("extra", normalized=True), AddedToken("<x>", lstrip=True, rstrip=True), AddedToken("  ", normalized=False)])
    return str(inner.to_str())
