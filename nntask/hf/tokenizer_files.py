"""Tokenizers as the files that ``AutoTokenizer`` loads: tokenizer.json and, unless the tokenizer came with one, a tokenizer_config.json.

Plain bytes are written as a BPE without merges over the byte alphabet of GPT-2 (`data.byte_letters`), whose ids are the bytes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.byte_letters import byte_letters
from ..data.foreign_tokenizer import TOKENIZER_FILE
from ..data.special_tokens import END_OF_TEXT, TOKENIZER_CONFIG
from ..data.tokenizer import ByteTokenizer, Tokenizer


def tokenizer_files(tokenizer: Tokenizer, longest: int) -> dict[str, str]:
    """Return the content of a tokenizer's files for a context of `longest` tokens; companion files that it was loaded with are unchanged."""
    content = _bytes(tokenizer) if isinstance(tokenizer, ByteTokenizer) else _saved(tokenizer)
    words = {token["id"]: token["content"] for token in content.get("added_tokens", []) if token.get("special")}
    special = tokenizer.special
    named = {"bos_token": words.get(special.bos), "eos_token": words.get(special.eos[0]) if special.eos else None}
    if named["eos_token"] == END_OF_TEXT:
        named["unk_token"] = END_OF_TEXT  # the same as in GPT-2's tokenizer
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "clean_up_tokenization_spaces": False}
    about |= {key: word for key, word in named.items() if word is not None}
    return {TOKENIZER_FILE: as_text(content), TOKENIZER_CONFIG: as_text(about), **special.files}


def as_text(values: Mapping[str, Any]) -> str:
    """Return indented JSON text with a newline at its end."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _saved(tokenizer: Tokenizer) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(Path(scratch))
        content: dict[str, Any] = json.loads(Path(scratch, TOKENIZER_FILE).read_text(encoding="utf-8"))
    return content


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
