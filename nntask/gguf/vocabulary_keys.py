"""Tokenizers as the metadata of GGUF files: the inverse of `vocabulary`.

If llama.cpp would read a tokenizer as another one, its keys are not written: the file has no vocabulary for llama.cpp, and other readers use the
tokenizer.json in it. If only rare texts differ, the keys are written. In both cases a sentence reports the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from .pre_tokenizers import Rule, is_composed, rule_of
from .text_ends import PREFIX, id_keys, unknown_ends
from .vocabulary import (
    BYTE,
    CHAT_TEMPLATE,
    CONTROL,
    KEEPING,
    NAME,
    NORMAL,
    SPACE,
    STRIPPING,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE,
    ids_of,
    merges_of,
)

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_BYTES: Final = 256
_NONE: Final = {f"{PREFIX}model": "none"}
_SHOWN: Final = 3


def keys_of(files: Mapping[str, str], vocab_size: int, *, begin: int | None, ends: Sequence[int], name: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return key -> value of a tokenizer in a file, and sentences about differences in llama.cpp.

    Args:
        files: its tokenizer.json, tokenizer_config.json and chat template, if it has them.
        vocab_size: V of the model; ids beyond the tokenizer's are padding, and tokens without a row of the model are left out.
        begin, ends: ids around texts.
        name: name of the model; it is written in a form from which llama.cpp draws no wrong conclusion.
    """
    content = json.loads(files[TOKENIZER])
    begin, ends = None if begin is None or begin >= vocab_size else begin, [end for end in ends if end < vocab_size]
    tokens, kinds = _tokens(content, vocab_size)
    keys: dict[str, Any] = dict(_NONE)
    notes = list[str]()
    reason = _unlike(content)
    if reason is None:
        known = {token: index for token, index in ids_of(content).items() if index < vocab_size}
        keys = _pieces(content, known, kinds) if content["model"].get("byte_fallback") else _bytes(content, known)
        keys |= {f"{PREFIX}tokens": tokens, f"{PREFIX}token_type": kinds, **_around(content, begin, ends)}
        notes += _differences(content, tokens, keys, begin, ends)
    else:
        notes.append(
            f"llama.cpp has no tokenizer like that of this model, which {reason}; the file has none for llama.cpp, and its tokenizer.json for nntask"
        )
    template = files.get(CHAT_TEMPLATE) or json.loads(files.get(TOKENIZER_CONFIG, "{}")).get("chat_template")
    if isinstance(template, str):
        keys[TEMPLATE] = template
    keys |= id_keys(begin, ends, tokens)
    if lost := unknown_ends(ends, keys, tokens):
        words = ", ".join(f"{end} ({tokens[end]})" if end < len(tokens) else str(end) for end in lost)
        notes.append(
            f"llama.cpp does not stop at {words}, which end a text too, as a file has three ends; nntask reads all from tokenizer.ggml.eos_token_ids"
        )
    return {**keys, WHOLE: files[TOKENIZER], **_named(name, content)}, notes


def _named(name: str, content: Mapping[str, Any]) -> dict[str, str]:
    """Return the key of a model's name. llama.cpp refuses a file named as a Phi 3 without its tokens, and strips spaces in a file with both."""
    is_phi = any(each in name.lower() for each in STRIPPING)
    if _strips_as_phi(content):
        return {NAME: name if is_phi else f"{name} ({STRIPPING[0]})"}
    return {} if is_phi or not name else {NAME: name}


def _strips_as_phi(content: Mapping[str, Any]) -> bool:
    """Return whether the special tokens of a tokenizer.json include the spaces after them, like those of a Phi 3."""
    added = {token["content"]: token for token in content.get("added_tokens", []) if token["special"]}
    strips = {word for word, token in added.items() if token.get("rstrip")}
    return bool(strips) and {*KEEPING, "</s>"} <= added.keys() and strips == added.keys() - set(KEEPING)


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the words of all ids of the model, and their types; ids without a word get a new one."""
    known = ids_of(content)
    count = max([vocab_size, *(index + 1 for index in known.values())])
    tokens, kinds = [""] * count, [UNUSED] * count
    for token, index in known.items():
        tokens[index], kinds[index] = token, NORMAL
    for token in content.get("added_tokens", []):
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    for index, kind in enumerate(kinds):
        if kind == UNUSED:
            tokens[index] = next(word for word in _padding(index) if word not in known)
    return tokens[:vocab_size], kinds[:vocab_size]


def _padding(index: int) -> Iterator[str]:
    """Yield words for an id without a token."""
    word = f"[PAD{index}]"
    while True:
        yield word
        word += "_"


def _unlike(content: Mapping[str, Any]) -> str | None:
    """Return why llama.cpp's tokens differ from those of a tokenizer.json, completing "which ..."; None if they are the same."""
    model = content["model"]
    if model["type"] != "BPE":
        return f"is a {model['type']}"
    if extra := [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(key)]:
        return f"has {' and '.join(extra)}"
    return _unlike_pieces(content) if model.get("byte_fallback") else _unlike_bytes(content)


def _unlike_bytes(content: Mapping[str, Any]) -> str | None:
    """Return why llama.cpp's tokens differ from those of a byte-level BPE, completing "which ..."; None if they are the same."""
    if rule_of(content) is None:
        step = content.get("pre_tokenizer")
        known = step if isinstance(step, Mapping) and step.get("type") == "ByteLevel" else {}
        keys = [f"{key} {str(value).lower()}" for key, value in known.items() if (key, value) in (("add_prefix_space", True), ("use_regex", False))]
        return "cuts texts by a rule without a name in llama.cpp" + (f" ({', '.join(keys)})" if keys else "")
    if content.get("normalizer") is not None and not is_composed(content):
        return f"changes texts by a {content['normalizer'].get('type')} before it cuts them"
    return None if content["model"]["merges"] else "has no merges, without which llama.cpp opens no vocabulary"


def _unlike_pieces(content: Mapping[str, Any]) -> str | None:
    """Return why llama.cpp's tokens differ from those of SentencePiece's BPE, completing "which ..."; None if they are the same."""
    if _puts_space(content) is None:
        return "changes or cuts texts otherwise than SentencePiece"
    known = content["model"]["vocab"]
    missing = [token for token in (f"<0x{byte:02X}>" for byte in range(_BYTES)) if token not in known]
    return f"lacks {len(missing)} of the {_BYTES} tokens of bytes" if missing else None


def _puts_space(content: Mapping[str, Any]) -> bool | None:
    """Return whether SentencePiece's BPE puts a space before a text; None if it does more than that and its usual steps."""
    steps = [*_flat(content.get("normalizer"), "normalizers"), *_flat(content.get("pre_tokenizer"), "pretokenizers")]
    puts = False
    for step in steps:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Prepend" and step.get("prepend") == SPACE:
            puts = True
        elif kind == "Metaspace" and step.get("replacement") == SPACE and not step.get("split", True):
            puts = puts or step.get("prepend_scheme", "always") != "never"
        elif not (
            (kind == "Replace" and pattern == {"String": " "} and step.get("content") == SPACE)
            or (kind == "Split" and pattern == {"String": " "} and str(step.get("behavior")).lower() == "mergedwithprevious")
        ):
            return None
    return puts if any(step.get("type") in ("Replace", "Metaspace") for step in steps) else None


def _flat(step: Any, key: str) -> list[Mapping[str, Any]]:
    if not isinstance(step, Mapping):
        return []
    return [inner for each in step.get(key, []) for inner in _flat(each, key)] if step.get("type") == "Sequence" else [step]


def _bytes(content: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys of a byte-level BPE."""
    rule = rule_of(content)
    assert isinstance(rule, Rule)  # `_unlike` has checked it
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    merges = [pair for pair in merges if pair.replace(" ", "", 1) in known]
    return {f"{PREFIX}model": "gpt2", f"{PREFIX}pre": rule.name, f"{PREFIX}merges": merges}


def _pieces(content: Mapping[str, Any], known: Mapping[str, int], kinds: list[int]) -> dict[str, Any]:
    """Return the keys of SentencePiece's BPE, and mark bytes and the unknown token in `kinds`. The score of a token is the rank of its first merge;
    earlier merges score higher, and tokens without a merge lowest."""
    scores = dict[int, float]()
    for rank, pair in enumerate(content["model"]["merges"]):
        index = known.get((pair if isinstance(pair, str) else " ".join(pair)).replace(" ", "", 1))
        if index is not None:
            scores.setdefault(index, -float(rank + 1))
    least = -float(len(content["model"]["merges"]) + 1)
    keys: dict[str, Any] = {f"{PREFIX}model": "llama", f"{PREFIX}scores": [scores.get(index, least) for index in range(len(kinds))]}
    for token, index in known.items():
        if _BYTE_TOKEN.fullmatch(token):
            kinds[index] = BYTE
    unknown = known.get(content["model"].get("unk_token") or "")
    if unknown is not None:
        kinds[unknown] = UNKNOWN
        keys[f"{PREFIX}unknown_token_id"] = unknown
    return {**keys, f"{PREFIX}add_space_prefix": bool(_puts_space(content))}


def _around(content: Mapping[str, Any], begin: int | None, ends: Sequence[int]) -> dict[str, Any]:
    """Return the keys of the ids that are put before and after a text."""
    single = _single(content.get("post_processor"))
    found = {f"{PREFIX}add_bos_token": begin is not None and single[:1] == [begin]}
    return {**found, f"{PREFIX}add_eos_token": True} if ends and len(single) > 1 and single[-1] == ends[0] else found


def _single(processor: Any) -> list[int | None]:
    """Return the ids that a post-processor of a tokenizer.json puts around a text, with None for the text."""
    if not isinstance(processor, Mapping):
        return [None]
    if processor.get("type") == "Sequence":
        return next((ids for each in processor.get("processors", []) if (ids := _single(each)) != [None]), [None])
    named = processor.get("special_tokens", {})
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1], None, processor["sep"][1]]
    steps = processor.get("single") or []
    around: list[int | None] = []
    for step in steps:
        around += named.get(step["SpecialToken"]["id"], {}).get("ids", []) if "SpecialToken" in step else [None]
    return around or [None]


def _differences(content: Mapping[str, Any], tokens: Sequence[str], keys: Mapping[str, Any], begin: int | None, ends: Sequence[int]) -> Iterator[str]:
    """Yield sentences about texts for which llama.cpp's tokens differ."""
    wide = [token["content"] for token in content.get("added_tokens", []) if any(token.get(key) for key in ("lstrip", "rstrip", "single_word"))]
    if wide and not _strips_as_phi(content):
        more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
        yield f"llama.cpp keeps the spaces next to {', '.join(wide[:_SHOWN])}{more}, which this tokenizer takes in, and finds them inside words"
    written = [*([begin] if keys[f"{PREFIX}add_bos_token"] else []), None, *(ends[:1] if keys.get(f"{PREFIX}add_eos_token") else [])]
    if (single := _single(content.get("post_processor"))) != written:
        words = " ".join("TEXT" if each is None else tokens[each] if each < len(tokens) else str(each) for each in single)
        yield f"llama.cpp puts other tokens around a text than this tokenizer, which makes {words}"
    if keys[f"{PREFIX}model"] == "llama":
        known = ids_of(content)
        wanted = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in content["model"]["merges"]]
        if wanted != list(merges_of(tokens, np.array(keys[f"{PREFIX}scores"]), known)):
            yield "llama.cpp merges tokens by their scores, from which other merges follow than this tokenizer has: ids of rare words may differ"
    elif is_composed(content) and not getattr(rule_of(content), "is_composed", False):
        yield "llama.cpp does not bring texts to the form NFC, as this tokenizer does: ids of letters with separate accents differ"
