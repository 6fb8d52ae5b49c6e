"""Conversion of tokenizers in the metadata of GGUF files to the files that `AutoTokenizer` loads.

A file has tokens, merges or scores, and the name of a rule that cuts texts into words. Two kinds are translated: byte-level BPE ("gpt2") with the
rules of `pre_tokenizers`, and SentencePiece's BPE ("llama"), whose merges follow from its scores. A file may also contain a tokenizer.json, under a
key of the format; it is used if its tokens are those of the list. Any other tokenizer is refused with a reason, which is reported when a tokenizer
is requested.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..io.json_text import decoded
from .pre_tokenizers import BY_NAME, DECODER
from .text_ends import PREFIX, ends_by_word, id_of, words_of

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
WHOLE: Final = "tokenizer.huggingface.json"
TEMPLATE: Final = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE: Final = "\u2581"
_ROLES: Final = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
NAME: Final = "general.name"
STRIPPING: Final = ("phi-3", "phi3")
KEEPING: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens that keep the spaces after them. All others strip these spaces if the model's name contains a word of `STRIPPING`, in llama.cpp and
in the model's own tokenizer.json.
"""
_MOST_IDS: Final = 1 << 22
"""Limit of the ids in a tokenizer.json, which may have more tokens than the model has rows."""
_LONGEST_CUT: Final = 256
"""Limit of the letters of a token of SentencePiece for which merges are looked up; tokens made of words are shorter."""
_MERGES_PER_TOKEN: Final = 4
_MERGES_BESIDES: Final = 1 << 12
"""Largest number of cuts of tokens into two others, in addition to those for each token; published vocabularies have about two for each token."""


class UntranslatedError(Exception):
    """Tokenizer that exists but cannot be translated; the text completes "its tokenizer ..."."""


def tokenizer_from(metadata: Mapping[str, Any], vocab_size: int) -> str | None:
    """Return the tokenizer.json of a file, None if the file has no tokenizer; arguments and errors are those of `files_from`."""
    kind = metadata.get(f"{PREFIX}model")
    tokens = words_of(metadata)
    whole = _whole(metadata, tokens, vocab_size)
    if whole is not None:
        return whole
    if kind in (None, "none", "no_vocab") and not tokens:
        return None
    if kind not in ("gpt2", "llama"):
        raise UntranslatedError(f"is of the kind {_shown(kind)}, and those of the kinds gpt2 and llama are read")
    if not tokens:
        raise UntranslatedError("has no tokenizer.ggml.tokens")
    named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)] if "" in tokens else tokens
    return _translated(metadata, named)


def files_from(metadata: Mapping[str, Any], longest: int, vocab_size: int) -> dict[str, str]:
    """Return name -> content of tokenizer.json and tokenizer_config.json, if the file has a tokenizer; `longest` is the context length in tokens.

    Raises:
        UntranslatedError: the tokenizer is broken or of another kind.
    """
    text = tokenizer_from(metadata, vocab_size)
    if text is None:
        return {}
    tokens = words_of(metadata)
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "clean_up_tokenization_spaces": False}
    for role, name in _ROLES.items():
        index = id_of(metadata, name)
        if index is not None and 0 <= index < len(tokens):
            about[role] = tokens[index]
    template = metadata.get(TEMPLATE)
    if isinstance(template, str):
        about["chat_template"] = template
    return {TOKENIZER: text, TOKENIZER_CONFIG: json.dumps(about, indent=2, ensure_ascii=False) + "\n"}


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _whole(metadata: Mapping[str, Any], tokens: Sequence[str], vocab_size: int) -> str | None:
    """Return the tokenizer.json stored in a file; None if there is none, or one of other tokens."""
    text = metadata.get(WHOLE)
    if not isinstance(text, str):
        return None
    try:
        known = ids_of(decoded(text))
        if not known or not all(type(index) is int and 0 <= index < _MOST_IDS for index in known.values()):
            return None
        return (
            text if all(tokens[index] == token for token, index in known.items() if index < len(tokens)) and len(tokens) in (0, vocab_size) else None
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def ids_of(content: Any) -> dict[str, int]:
    """Return token -> id of a tokenizer.json."""
    vocab = content["model"]["vocab"]
    listed = {each[0]: index for index, each in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return listed | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def _kinds(metadata: Mapping[str, Any], count: int) -> list[int]:
    """Return the type of every token."""
    given = metadata.get(f"{PREFIX}token_type")
    if given is None:
        return [NORMAL] * count
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu" or len(given) < count:
        got = f"{len(given)} of {given.dtype}" if isinstance(given, np.ndarray) else _shown(given)
        raise UntranslatedError(f"has a tokenizer.ggml.token_type that must be {count} whole numbers, one for each token, got {got}")
    return list(given[:count].tolist())


def _translated(metadata: Mapping[str, Any], tokens: Sequence[str]) -> str:
    """Return a tokenizer.json built from tokens and merges or scores."""
    kinds, is_pieces = _kinds(metadata, len(tokens)), metadata.get(f"{PREFIX}model") == "llama"
    known = dict(zip(tokens, range(len(tokens)), strict=True))
    if num_unused := kinds.count(UNUSED):
        known = {token: index for index, token in enumerate(tokens) if kinds[index] != UNUSED}
    if len(known) != len(kinds) - num_unused:
        twice = next(index for index, token in enumerate(tokens) if kinds[index] != UNUSED and known[token] != index)
        raise UntranslatedError(f"has the token {_shown(tokens[twice])} twice, as {twice} and {known[tokens[twice]]}")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {*(index for index, kind in enumerate(kinds) if kind == CONTROL), *ends_by_word(tokens)}
    marked = sorted({*special, *(index for index, kind in enumerate(kinds) if kind == USER_DEFINED)})
    strips = any(name in str(metadata.get(NAME)).lower() for name in STRIPPING)
    added: list[dict[str, Any]] = [
        {"id": index, "content": tokens[index], **flags, "special": index in special, "rstrip": strips and tokens[index] not in KEEPING}
        for index in marked
        if kinds[index] != UNUSED
    ]
    sections = _sentence_piece(metadata, tokens, known) if is_pieces else _byte_level(metadata, known, {each["content"] for each in added})
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None}
    return json.dumps({**content, "post_processor": _around(metadata, tokens, is_pieces=is_pieces), **sections}, ensure_ascii=False)


def _around(metadata: Mapping[str, Any], tokens: Sequence[str], *, is_pieces: bool) -> dict[str, Any] | None:
    """Return the template that puts tokens before and after a text; None if it puts none."""
    rule = BY_NAME.get(str(metadata.get(f"{PREFIX}pre")))
    adds_bos = metadata.get(f"{PREFIX}add_bos_token", is_pieces or (rule is not None and rule.adds_bos))
    wanted = {"bos_token_id": adds_bos is True, "eos_token_id": metadata.get(f"{PREFIX}add_eos_token") is True}
    ids = {name: id_of(metadata, name) for name, is_added in wanted.items() if is_added}
    words = {name: tokens[index] for name, index in ids.items() if index is not None and 0 <= index < len(tokens)}
    if not words:
        return None
    begin, end = ([words[name]] if name in words else [] for name in ("bos_token_id", "eos_token_id"))
    single, second = ([*_special(begin, kind), {"Sequence": {"id": text, "type_id": kind}}, *_special(end, kind)] for kind, text in enumerate("AB"))
    named = {word: {"id": word, "ids": [ids[name]], "tokens": [word]} for name, word in words.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": named}


def _special(words: Sequence[str], kind: int) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": word, "type_id": kind}} for word in words]


def _bpe(known: Mapping[str, int], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False}
    return {**model, "byte_fallback": False, "ignore_merges": False, "vocab": dict(known), "merges": merges, **more}


def _byte_level(metadata: Mapping[str, Any], known: Mapping[str, int], added: set[str]) -> dict[str, Any]:
    name = metadata.get(f"{PREFIX}pre", "default")
    rule = BY_NAME.get(name) if isinstance(name, str) else None
    if rule is None:
        raise UntranslatedError(f"cuts texts by the rule {_shown(name)} (tokenizer.ggml.pre), which nntask does not know")
    found: dict[str, Any] = {"pre_tokenizer": rule.pre_tokenizer(), "decoder": DECODER}
    if rule.is_composed:
        found["normalizer"] = {"type": "NFC"}
    return {**found, "model": _bpe(known, _pairs(metadata, known, added), ignore_merges=rule.ignores_merges)}


def _pairs(metadata: Mapping[str, Any], known: Mapping[str, int], added: set[str]) -> list[list[str]]:
    """Return the merges of a byte-level BPE without a check; `wrong_merge` finds a wrong one."""
    merges = metadata.get(f"{PREFIX}merges", [])
    if not isinstance(merges, list):
        raise UntranslatedError("has a tokenizer.ggml.merges that is no list of texts")
    if not merges and any(len(token) > 1 and token not in added for token in known):
        raise UntranslatedError("has no tokenizer.ggml.merges, without which every text would fall to single bytes")
    return [pair.split(" ", 1) for pair in merges]


def wrong_merge(metadata: Mapping[str, Any]) -> str:
    """Return a phrase on a merge that the tokenizers package refuses, completing "the tokenizer ..."; "" if there is none.

    It is called only after the package has refused a merge.
    """
    tokens, merges = words_of(metadata), metadata.get(f"{PREFIX}merges", [])
    known = {token for token, kind in zip(tokens, _kinds(metadata, len(tokens)), strict=False) if kind != UNUSED}
    for text in merges if isinstance(merges, list) else []:
        first, space, second = text.partition(" ")
        if not space or not {first, second, first + second} <= known:
            return f"has the merge {_shown(text)} in tokenizer.ggml.merges, and a merge is two tokens that make a third one"
    return ""


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str], known: Mapping[str, int]) -> dict[str, Any]:
    unknown = id_of(metadata, "unknown_token_id")
    word = tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    returns: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer: dict[str, Any] = replaces
    if metadata.get(f"{PREFIX}add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replaces]}
        returns.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scores = _scores(metadata, len(tokens))
    merges = list(itertools.islice(merges_of(tokens, scores, known), (most := _MERGES_PER_TOKEN * len(tokens) + _MERGES_BESIDES) + 1))
    if len(merges) > most:
        raise UntranslatedError(
            f"has {len(tokens)} tokens that can be made in more than {most} ways, and at most {_MERGES_PER_TOKEN} a token are read"
        )
    model = _bpe(known, merges, unk_token=word, fuse_unk=True, byte_fallback=True)
    return {"normalizer": normalizer, "decoder": {"type": "Sequence", "decoders": returns}, "model": model}


def _scores(metadata: Mapping[str, Any], count: int) -> np.ndarray[Any, Any]:
    """Return the scores (V,) of all tokens."""
    given = metadata.get(f"{PREFIX}scores")
    is_number = isinstance(given, np.ndarray) and given.dtype.kind in "if" and given.dtype.itemsize >= 4
    if not isinstance(given, np.ndarray) or not is_number or len(given) < count or not np.isfinite(given).all():
        got = f"{len(given)} of {given.dtype}" if isinstance(given, np.ndarray) else _shown(given)
        raise UntranslatedError(f"has tokenizer.ggml.scores that must be {count} finite numbers, one for each token, got {got}")
    return np.asarray(given[:count])


def merges_of(tokens: Sequence[str], scores: np.ndarray[Any, Any], known: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the merges of SentencePiece's BPE, best first: every cut of a token into two. The score of a token ranks all merges that make it."""
    for index in np.argsort(-scores.astype(np.float64), kind="stable"):
        token = tokens[index]
        splits = range(1, len(token)) if len(token) < _LONGEST_CUT and known.get(token) == index else ()
        cuts = [(token[:at], token[at:]) for at in splits if token[:at] in known and token[at:] in known]
        yield from sorted(cuts, key=lambda cut: (known[cut[0]], known[cut[1]]))
