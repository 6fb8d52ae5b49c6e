"""Tokenizers of the kinds that GGUF files can say."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nntask.gguf.pre_tokenizers import BY_NAME

TEXTS = ["It's 12345 words,  and\n\n more of\tthem; 東京 émigré don't WON'T\r\n x", "the other the other of the others", " ", "", "0 00 000 0000"]
CORPUS = [*TEXTS, "some words and some more words; the others, 1 22 333 4444"] * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def as_read(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys as a reader has them, lists of numbers as arrays."""
    numbers = ("tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.eos_token_ids")
    return {key: np.array(value) if key in numbers else value for key, value in keys.items()}


def trained(inner: Tokenizer, special: list[str], **more: Any) -> Tokenizer:
    """A tokenizer that has learnt the corpus."""
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, **more))
    return inner


def byte_level(rule: str) -> Tokenizer:
    """A byte-level BPE that cuts texts by a rule."""
    found = BY_NAME[rule]
    inner = Tokenizer(models.BPE(ignore_merges=found.ignores_merges))
    content = json.loads(inner.to_str())
    content["pre_tokenizer"] = found.pre_tokenizer()
    inner = Tokenizer.from_str(json.dumps(content))
    if found.is_composed:
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return trained(inner, ["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def sentence_piece(*, has_prefix: bool) -> Tokenizer:
    """A BPE over pieces with bytes to fall back to, as LLaMA 2 and Gemma have it."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if has_prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    inner = trained(inner, ["<unk>", "<s>", "</s>", *BYTES], limit_alphabet=40)
    content = json.loads(inner.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    return Tokenizer.from_str(json.dumps(content))
