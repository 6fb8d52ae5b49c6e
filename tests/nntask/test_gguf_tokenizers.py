"""Tokenizers through the metadata of GGUF files: byte-level BPE by its rules, SentencePiece's BPE by its scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizers_of_others import BEGIN, END, TURN, llama3
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nntask.data.tokenizer import ByteTokenizer, load_tokenizer
from nntask.gguf.vocabulary import _PATTERNS, files_from, ids_from, keys_of
from nntask.hf.tokenizer_files import tokenizer_files

TEXTS = ["It's 12345 words,  and\n\n more of\tthem; 東京 émigré don't WON'T\r\n x", "the other the other of the others", " ", "", "0 00 000 0000"]
CORPUS = [*TEXTS, "some words and some more words; the others, 1 22 333 4444"] * 20


def as_read(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys as a reader has them, lists of numbers as arrays."""
    numbers = ("tokenizer.ggml.token_type", "tokenizer.ggml.scores")
    return {key: np.array(value) if key in numbers else value for key, value in keys.items()}


def trained(inner: Tokenizer, special: list[str], **more: Any) -> Tokenizer:
    """A tokenizer that has learnt the corpus."""
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, **more))
    return inner


def byte_level(rule: str) -> Tokenizer:
    """A byte-level BPE that cuts texts by a rule."""
    inner = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in _PATTERNS)
    if rule in _PATTERNS:
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PATTERNS[rule]), "isolated"), level])
    elif rule == "smollm":
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    else:
        inner.pre_tokenizer = level
    if rule == "qwen2":
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
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = trained(inner, special, limit_alphabet=40)
    content = json.loads(inner.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    return Tokenizer.from_str(json.dumps(content))


TOKENIZERS = {
    **{rule: (lambda rule=rule: byte_level(rule)) for rule in ("gpt-2", "llama-bpe", "qwen2", "smollm")},
    "llama": lambda: sentence_piece(has_prefix=True),
    "gemma": lambda: sentence_piece(has_prefix=False),
}


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_tokenizer_comes_back_from_its_keys_alone(tmp_path: Path, name: str) -> None:
    """Equal ids of all texts, and equal texts of all ids, without the tokenizer.json that is there besides."""
    inner = TOKENIZERS[name]()
    vocab_size = inner.get_vocab_size() + 7
    keys = keys_of({"tokenizer.json": inner.to_str()}, vocab_size, begin=1, ends=(2,))
    assert keys["tokenizer.ggml.model"] == ("llama" if name in ("llama", "gemma") else "gpt2")
    assert keys.get("tokenizer.ggml.pre", name) == name
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == vocab_size
    assert files_from(as_read(keys), 16)["tokenizer.json"] == inner.to_str()
    del keys["tokenizer.huggingface.json"]
    for file, text in files_from(as_read(keys), 16).items():
        (tmp_path / file).write_text(text)
    again = load_tokenizer(tmp_path)
    for text in CORPUS[:8]:
        ids = inner.encode(text, add_special_tokens=False).ids
        assert again.encode([text])[0].tolist() == ids
        assert again.decode(ids) == inner.decode(ids)
    assert again.vocab_size == inner.get_vocab_size()


def test_what_is_put_before_a_text(tmp_path: Path) -> None:
    """Llama 3's begin-of-text token, and both of its ends."""
    directory = llama3(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": BEGIN, "eos_token_id": [END, TURN]}))
    tokenizer = load_tokenizer(directory)
    special = tokenizer.special
    keys = keys_of(tokenizer_files(tokenizer, 16), 300, begin=special.bos, ends=special.eos)
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert ids_from(keys, 300) == {"bos_token_id": BEGIN, "eos_token_id": [END, TURN]}
    del keys["tokenizer.huggingface.json"]
    (tmp_path / "again").mkdir()
    for file, text in files_from(as_read(keys), 16).items():
        (tmp_path / "again" / file).write_text(text)
    again = load_tokenizer(tmp_path / "again")
    assert again.encode(["x"], special=True)[0].tolist() == tokenizer.encode(["x"], special=True)[0].tolist() == [BEGIN, *tokenizer.encode(["x"])[0]]


def test_plain_bytes() -> None:
    """The tokenizer of models without one: its alphabet has no merges."""
    tokenizer = ByteTokenizer()
    keys = keys_of(tokenizer_files(tokenizer, 16), 300, begin=256, ends=(256,))
    inner = Tokenizer.from_str(files_from(as_read(keys), 16)["tokenizer.json"])
    assert inner.encode("é a").ids == list("é a".encode())


def test_what_is_not_believed() -> None:
    """A tokenizer.json of other tokens, rules that nobody knows, and kinds of tokenizers that are not translated."""
    keys = as_read(keys_of({"tokenizer.json": byte_level("gpt-2").to_str()}, 420, begin=None, ends=()))
    other = {**keys, "tokenizer.huggingface.json": byte_level("smollm").to_str().replace('"!"', '"?"')}
    assert files_from(other, 16)["tokenizer.json"] != other["tokenizer.huggingface.json"]
    for text in ("", "[]", "{", "[" * 100_000, '{"model": {"vocab": {"a": -1}}}'):
        assert files_from({**keys, "tokenizer.huggingface.json": text}, 16)["tokenizer.json"] != text
    del keys["tokenizer.huggingface.json"]
    assert files_from({**keys, "tokenizer.ggml.pre": "of the future"}, 16) == {}
    assert files_from({**keys, "tokenizer.ggml.model": "bert"}, 16) == {}
    assert files_from({}, 16) == {}
