"""Tokenizers as the files that ``AutoTokenizer`` loads: tokenizer.json and, unless the tokenizer came with one, a tokenizer_config.json.

Plain bytes are written as a BPE without merges over the byte alphabet of GPT-2 (`data.byte_letters`), whose ids are the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..data.byte_letters import byte_letters
from ..data.foreign_tokenizer import TOKENIZER_FILE
from ..data.special_tokens import END_OF_TEXT, TOKENIZER_CONFIG
from ..data.tokenizer import ByteTokenizer, Tokenizer


def tokenizer_files(tokenizer: Tokenizer, longest: int, *, begins_after_end: bool = False) -> dict[str, str]:
    """Return the content of a tokenizer's files; companion files that it was loaded with are unchanged.

    Args:
        tokenizer: tokenizer of the model.
        longest: number of tokens of the model's context.
        begins_after_end: whether texts of the model begin after an end-of-text token. If so, and the tokenizer has no template, it gets one
            that puts the token there.
    """
    content = _bytes(tokenizer) if isinstance(tokenizer, ByteTokenizer) else json.loads(tokenizer.content())
    words = {token["id"]: token["content"] for token in content.get("added_tokens", []) if token.get("special")}
    special = tokenizer.special
    if begins_after_end and special.eos and not _has_template(content.get("post_processor")):
        content["post_processor"] = _template(_word(tokenizer, special.eos[0]), special.eos[0], content.get("post_processor"))
    named = {"bos_token": words.get(special.bos), "eos_token": words.get(special.eos[0]) if special.eos else None}
    if named["eos_token"] == END_OF_TEXT:
        named["unk_token"] = END_OF_TEXT  # the same as in GPT-2's tokenizer
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "clean_up_tokenization_spaces": False}
    about |= {key: word for key, word in named.items() if word is not None}
    return {TOKENIZER_FILE: as_text(content), TOKENIZER_CONFIG: as_text(about), **special.files}


def as_text(values: Mapping[str, Any]) -> str:
    """Return indented JSON text with a newline at its end."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _has_template(processor: Mapping[str, Any] | None) -> bool:
    """Return whether a post-processor of a tokenizer.json may put tokens around a text."""
    if processor is None:
        return False
    inner = processor["processors"] if processor["type"] == "Sequence" else [processor]
    return any(each["type"] != "ByteLevel" for each in inner)


def _template(word: str, token: int, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the post-processor that puts a token before each text, after the processor `before`."""
    first, second = ([{"SpecialToken": {"id": word, "type_id": row}}, {"Sequence": {"id": name, "type_id": row}}] for row, name in enumerate("AB"))
    known = {word: {"id": word, "ids": [token], "tokens": [word]}}
    template = {"type": "TemplateProcessing", "single": first, "pair": [*first, *second], "special_tokens": known}
    return template if before is None else {"type": "Sequence", "processors": [before, template]}


def _word(tokenizer: Tokenizer, token: int) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        return byte_letters().get(token, END_OF_TEXT)
    return tokenizer.word(token)


def _bytes(tokenizer: ByteTokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer.json for plain bytes."""
    vocab = {letter: byte for byte, letter in sorted(byte_letters().items())}
    added = []
    if tokenizer.vocab_size > len(vocab):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": tokenizer.end_of_text, "content": END_OF_TEXT, **flags, "special": True}]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {**model, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []},
    }
