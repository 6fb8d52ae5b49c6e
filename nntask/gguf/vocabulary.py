"""Tokenizers as the metadata of GGUF files: from the files that `AutoTokenizer` loads, and back.

A file has the tokens, merges or scores, and the name of a rule that cuts texts into words. Two kinds are translated: byte-level BPE ("gpt2") with
the rules that are listed here, and SentencePiece's BPE ("llama"), whose merges follow from its scores. A file that was written here has the
tokenizer.json besides, under a key that the format has for it, and comes back as it was; it is believed where its tokens are those of the list. A
tokenizer of another kind is left out, and the model comes without one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
_PREFIX: Final = "tokenizer.ggml."
_WHOLE: Final = "tokenizer.huggingface.json"
_TEMPLATE: Final = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE: Final = "\u2581"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: Final = {"llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""Name of a rule -> its regular expression."""
_SAME: Final = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt2": "gpt-2", "deepseek-r1-qwen": "qwen2", "starcoder": "smollm"}
"""Other names of rules."""
_ROLES: Final = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}


def _id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of a special token; None where there is none."""
    value = metadata.get(_PREFIX + name)
    return value if type(value) is int else None


def ids_from(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The ids around texts, as configs have them; ends of a turn are ends of texts too."""
    ends = [end for name in ("eos_token_id", "eot_token_id") if (end := _id(metadata, name)) is not None and end < vocab_size]
    ends = list(dict.fromkeys(ends))
    begin = _id(metadata, "bos_token_id")
    found = {"bos_token_id": begin if begin is not None and begin < vocab_size else None}
    return {**found, "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}


def files_from(metadata: Mapping[str, Any], longest: int) -> dict[str, str]:
    """File name -> content: tokenizer.json, and its tokenizer_config.json; nothing where there is no tokenizer that can be translated.

    Args:
        metadata: of the file.
        longest: context length of the model, in tokens.
    """
    tokens = metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list):
        return {}
    whole = _whole(metadata, tokens)
    text = whole if whole is not None else _translated(metadata, tokens)
    if text is None:
        return {}
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "clean_up_tokenization_spaces": False}
    for role, name in _ROLES.items():
        index = _id(metadata, name)
        if index is not None and index < len(tokens):
            about[role] = tokens[index]
    template = metadata.get(_TEMPLATE)
    if isinstance(template, str):
        about["chat_template"] = template
    return {TOKENIZER: text, TOKENIZER_CONFIG: json.dumps(about, indent=2, ensure_ascii=False) + "\n"}


def _whole(metadata: Mapping[str, Any], tokens: list[str]) -> str | None:
    """The tokenizer.json that a file has besides; None where it has none, or one of other tokens."""
    text = metadata.get(_WHOLE)
    if not isinstance(text, str):
        return None
    try:
        known = _ids_of(json.loads(text))
        return text if all(0 <= index < len(tokens) and tokens[index] == token for token, index in known.items()) else None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _ids_of(content: Any) -> dict[str, int]:
    """Token -> id, of a tokenizer.json with a table of them."""
    vocab: dict[str, int] = dict(content["model"]["vocab"])
    return vocab | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def _translated(metadata: Mapping[str, Any], tokens: list[str]) -> str | None:
    """A tokenizer.json from tokens and merges or scores; None where it cannot be expressed."""
    given = metadata.get(f"{_PREFIX}token_type")
    kinds = given if isinstance(given, np.ndarray) and len(given) == len(tokens) else np.ones(len(tokens), np.int32)
    known = {token: index for index, token in enumerate(tokens) if kinds[index] != _UNUSED}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    marked = (_CONTROL, _USER_DEFINED)
    added = [
        {"id": index, "content": token, **flags, "special": bool(kinds[index] == _CONTROL)}
        for token, index in known.items()
        if kinds[index] in marked
    ]
    model = metadata.get(f"{_PREFIX}model")
    found = _byte_level(metadata, known) if model == "gpt2" else _sentence_piece(metadata, tokens, known) if model == "llama" else None
    if found is None:
        return None
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None}
    return json.dumps({**content, "post_processor": _begin(metadata, tokens, default=model == "llama"), **found}, ensure_ascii=False)


def _begin(metadata: Mapping[str, Any], tokens: list[str], *, default: bool) -> dict[str, Any] | None:
    """The template that puts a begin-of-text token before a text; None where there is none."""
    rule = metadata.get(f"{_PREFIX}pre")
    adds = metadata.get(f"{_PREFIX}add_bos_token", default or _SAME.get(str(rule), rule) == "llama-bpe")
    index = _id(metadata, "bos_token_id")
    if adds is not True or index is None or index >= len(tokens):
        return None
    word = tokens[index]
    special, text = {"SpecialToken": {"id": word, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = [{"SpecialToken": {"id": word, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    named = {word: {"id": word, "ids": [index], "tokens": [word]}}
    return {"type": "TemplateProcessing", "single": [special, text], "pair": [special, text, *second], "special_tokens": named}


def _bpe(known: Mapping[str, int], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False}
    return {**model, "byte_fallback": False, "ignore_merges": False, "vocab": dict(known), "merges": merges, **more}


def _byte_level(metadata: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, Any] | None:
    merges, rule = metadata.get(f"{_PREFIX}merges", []), metadata.get(f"{_PREFIX}pre", "gpt-2")
    words = _words(_SAME.get(str(rule), str(rule)))
    if words is None or not isinstance(merges, list):
        return None
    found: dict[str, Any] = {"pre_tokenizer": words, "decoder": _level(use_regex=True)}
    if rule in ("qwen2", "deepseek-r1-qwen"):
        found["normalizer"] = {"type": "NFC"}
    ignores = _SAME.get(str(rule), rule) == "llama-bpe"
    return {**found, "model": _bpe(known, [pair.split(" ", 1) for pair in merges], ignore_merges=ignores)}


def _level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _words(rule: str) -> dict[str, Any] | None:
    """How texts are cut into words by a rule; None where it is not known."""
    if rule == "gpt-2":
        return _level(use_regex=True)
    if rule == "smollm":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _level(use_regex=True)]}
    if rule not in _PATTERNS:
        return None
    split = {"type": "Split", "pattern": {"Regex": _PATTERNS[rule]}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _level(use_regex=False)]}


def _rule_of(content: Mapping[str, Any]) -> str:
    """The name of the rule by which a tokenizer.json cuts texts; "default" where it has no name here."""
    here = content.get("pre_tokenizer")
    inner = here.get("pretokenizers", [here]) if isinstance(here, Mapping) else []
    patterns = {pattern: rule for rule, pattern in _PATTERNS.items()}
    kinds = [each.get("type") for each in inner]
    if kinds == ["ByteLevel"] and inner[0].get("use_regex", True) and not inner[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and inner[0].get("individual_digits"):
        return "smollm"
    found = patterns.get(inner[0].get("pattern", {}).get("Regex", "")) if kinds == ["Split", "ByteLevel"] else None
    return found or "default"


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], known: Mapping[str, int]) -> dict[str, Any] | None:
    scores = metadata.get(f"{_PREFIX}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        return None
    unknown = _id(metadata, "unknown_token_id")
    word = tokens[unknown] if unknown is not None and unknown < len(tokens) else None
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    returns: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer: dict[str, Any] = replaces
    if metadata.get(f"{_PREFIX}add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replaces]}
        returns.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(known, list(_merges_of(tokens, scores, known)), unk_token=word, fuse_unk=True, byte_fallback=True)
    return {"normalizer": normalizer, "decoder": {"type": "Sequence", "decoders": returns}, "model": model}


def _merges_of(tokens: list[str], scores: np.ndarray[Any, Any], known: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The merges of SentencePiece's BPE, best first: every cut of a token into two, as the score of a token ranks all merges that make it."""
    for index in np.argsort(-scores.astype(np.float64), kind="stable"):
        token = tokens[index]
        cuts = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in known and token[at:] in known] if len(token) < 256 else []
        yield from sorted(cuts, key=lambda cut: (known[cut[0]], known[cut[1]]))


def keys_of(files: Mapping[str, str], vocab_size: int, *, begin: int | None, ends: Sequence[int]) -> dict[str, Any]:
    """Key -> value that a tokenizer has in a file.

    Args:
        files: its tokenizer.json, tokenizer_config.json and chat template, as far as it has them.
        vocab_size: V of the model; ids beyond the tokenizer's are padding, and tokens without a row of the model are left out.
        begin, ends: ids around texts.
    """
    content, text = json.loads(files[TOKENIZER]), files[TOKENIZER]
    if content["model"]["type"] == "BPE" and any(index >= vocab_size for index in _ids_of(content).values()):
        content = _with_rows(content, vocab_size)
        text = json.dumps(content, ensure_ascii=False)
    begin, ends = None if begin is None or begin >= vocab_size else begin, [end for end in ends if end < vocab_size]
    found: dict[str, Any] = {f"{_PREFIX}model": "none"}
    if content["model"]["type"] == "BPE":
        known = _ids_of(content)
        tokens = [f"[PAD{index}]" for index in range(vocab_size)]
        kinds = [_UNUSED] * vocab_size
        for token, index in known.items():
            tokens[index], kinds[index] = token, _NORMAL
        for token in content.get("added_tokens", []):
            kinds[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
        found = _pieces(content, known, kinds) if content["model"].get("byte_fallback") else _bytes(content)
        found |= {f"{_PREFIX}tokens": tokens, f"{_PREFIX}token_type": kinds}
    template = files.get(CHAT_TEMPLATE) or json.loads(files.get(TOKENIZER_CONFIG, "{}")).get("chat_template")
    if isinstance(template, str):
        found[_TEMPLATE] = template
    found |= id_keys(begin, ends)
    found[f"{_PREFIX}add_bos_token"] = begin is not None and _puts_first(content.get("post_processor"), begin)
    return {**found, _WHOLE: text}


def _with_rows(content: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json without the tokens that a model has no row for, such as those of images; their text is then encoded as any other."""
    model = content["model"]
    vocab = {token: index for token, index in model["vocab"].items() if index < vocab_size}
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = [pair for pair in pairs if "".join(pair) in vocab]
    added = [token for token in content.get("added_tokens", []) if token["id"] < vocab_size]
    return {**content, "added_tokens": added, "model": {**model, "vocab": vocab, "merges": merges}}


def id_keys(begin: int | None, ends: Sequence[int]) -> dict[str, Any]:
    """Key -> id, of those around texts; a file has two that end one at most."""
    named = {"bos_token_id": begin, "eos_token_id": ends[0] if ends else None, "eot_token_id": ends[1] if len(ends) > 1 else None}
    return {_PREFIX + name: index for name, index in named.items() if index is not None}


def _bytes(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a byte-level BPE."""
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    return {f"{_PREFIX}model": "gpt2", f"{_PREFIX}pre": _rule_of(content), f"{_PREFIX}merges": merges}


def _pieces(content: Mapping[str, Any], known: Mapping[str, int], kinds: list[int]) -> dict[str, Any]:
    """The keys of SentencePiece's BPE; marks bytes and the unknown token among `kinds`. A token is worth its first merge, earlier ones more."""
    scores = [0.0] * len(kinds)
    for rank, pair in enumerate(content["model"]["merges"]):
        whole = (pair if isinstance(pair, str) else " ".join(pair)).replace(" ", "", 1)
        index = known.get(whole)
        if index is not None and scores[index] == 0.0:
            scores[index] = -float(rank + 1)
    found: dict[str, Any] = {f"{_PREFIX}model": "llama", f"{_PREFIX}scores": scores}
    for token, index in known.items():
        if _BYTE_TOKEN.fullmatch(token):
            kinds[index] = _BYTE
    unknown = known.get(content["model"].get("unk_token") or "")
    if unknown is not None:
        kinds[unknown] = _UNKNOWN
        found[f"{_PREFIX}unknown_token_id"] = unknown
    found[f"{_PREFIX}add_space_prefix"] = '"Prepend"' in json.dumps(content.get("normalizer"))
    return found


def _puts_first(processor: Any, begin: int) -> bool:
    """Whether a post-processor of a tokenizer.json puts an id before a text."""
    if not isinstance(processor, Mapping):
        return False
    if processor.get("type") == "Sequence":
        return any(_puts_first(each, begin) for each in processor.get("processors", []))
    single = processor.get("single") or [{}]
    word = single[0].get("SpecialToken", {}).get("id") if isinstance(single[0], Mapping) else None
    return word is not None and begin in processor.get("special_tokens", {}).get(word, {}).get("ids", [])
