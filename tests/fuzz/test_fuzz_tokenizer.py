"""Damaged tokenizers and the files beside them: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values, random_bytes
from support.untrusted import fuzz, valid_files

WHOLE = valid_files("tokenizer")["tokenizer.json"]
BESIDE = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 16,
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True, "lstrip": False}},
        "chat_template": "{{ messages }}",
        "add_bos_token": False,
    },
    "special_tokens_map.json": {"eos_token": {"content": "<|endoftext|>", "lstrip": False}, "additional_special_tokens": ["<a>"]},
    "generation_config.json": {"eos_token_id": [0], "bos_token_id": 0, "temperature": 1.0},
}


@pytest.mark.long
@settings(max_examples=1200)
@given(st.one_of(damaged(WHOLE), other_values(json.loads(WHOLE)).map(lambda values: json.dumps(values).encode()), random_bytes(b'{"version":')))
def test_tokenizer_files(place: Path, content: bytes) -> None:
    """Bytes and values of a tokenizer.json."""
    fuzz("tokenizer", place, content)


@pytest.mark.long
@settings(max_examples=1200)
@given(st.sampled_from(sorted(BESIDE)), st.data())
def test_files_beside_a_tokenizer(place: Path, name: str, data: st.DataObject) -> None:
    """Bytes and values of the files that say more of a tokenizer."""
    values = data.draw(other_values(BESIDE[name]))
    content: Any = json.dumps(values).encode()
    fuzz("tokenizer", place, data.draw(st.just(content) | damaged(content)), name)
