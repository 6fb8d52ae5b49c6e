"""Situations of public reports about GGUF files, set up on small files. Each test names what was reported elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_rules import LETTERS, keys_of_rule, record, write_small
from support.gguf_tokenizers import BYTES, as_read
from tokenizers import Tokenizer

from nntask.data.tokenizer import load_tokenizer
from nntask.errors import DataError, StorageError
from nntask.gguf.config_keys import config_from
from nntask.gguf.model_file import open_gguf
from nntask.gguf.vocabulary import UntranslatedError, files_from, tokenizer_from
from nntask.gguf.vocabulary_keys import keys_of
from nntask.inference.pretrained import ModelSource
from nntask.models.registry import config_from_dict
from wrappers.cli import main

PRE = "tokenizer.ggml."


def bytes_and(words: list[str], rule: str = "llama-bpe", **more: Any) -> dict[str, Any]:
    """The metadata of a byte-level BPE with special tokens behind the letters."""
    keys = keys_of_rule(rule, ["t h"])
    tokens = [*LETTERS, "th", *words]
    kinds = [1] * 257 + [3] * len(words)
    return {**keys, f"{PRE}tokens": tokens, f"{PRE}token_type": kinds, **{f"{PRE}{key}": value for key, value in more.items()}}


def small(path: Path, keys: dict[str, Any], extra: int = 0) -> Path:
    """A model with that tokenizer."""
    return write_small(path / "model.gguf", keys, len(keys[f"{PRE}tokens"]) + extra)


def stops(path: Path) -> set[int]:
    """The ids that end a text for `generate` and `serve`."""
    source = ModelSource.open(path)
    return set(source.text_ids(source.tokenizer()).stop)


def test_llama_3_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """Only the end of the text is a key, and the model ends turns by another token."""
    path = small(tmp_path, bytes_and(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], bos_token_id=257, eos_token_id=258))
    assert stops(path) == {258, 259}
    assert load_tokenizer(path).special.eos == (258, 259)


def test_a_gemma_whose_converter_forgot_the_end_of_turns(tmp_path: Path) -> None:
    """The token is known by its word, although its type is that of a plain one."""
    keys = bytes_and(["<eos>", "<end_of_turn>"], "gpt-2", eos_token_id=257)
    keys[f"{PRE}token_type"][258] = 1
    path = small(tmp_path, keys)
    assert stops(path) == {257, 258}
    assert load_tokenizer(path).encode(["a<end_of_turn>"])[0].tolist() == [LETTERS.index("a"), 258]


def test_a_list_of_ends_in_generation_config_reaches_the_file() -> None:
    """Two ends of which the second is the one that the model uses; and three, one of them of messages."""
    inner = json.loads(tokenizer_from(as_read(bytes_and(["<eos>", "<end_of_turn>", "<|eom_id|>"])), 260) or "")
    for ends in ((257, 258), (257, 259, 258)):
        keys, notes = keys_of({"tokenizer.json": json.dumps(inner)}, 260, begin=None, ends=ends)
        assert (keys[f"{PRE}eos_token_id"], keys[f"{PRE}eot_token_id"], keys.get(f"{PRE}eom_token_id", 259)) == (257, 258, 259)
        assert notes == []


@pytest.mark.parametrize("index", [300, 1 << 31])
def test_an_end_beyond_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str], index: int) -> None:
    """It cannot come; it is named, and the words of tokens tell the ends."""
    path = small(tmp_path, bytes_and(["</s>"], "gpt-2", eos_token_id=index))
    assert stops(path) == {257}
    assert main(["generate", str(path), "--prompt=a", "--max-new-tokens=1"]) == 0
    assert f"tokenizer.ggml.eos_token_id {index}, and its ids end at 257" in capsys.readouterr().err


def test_an_id_of_minus_one_is_none(tmp_path: Path) -> None:
    """As a number without a sign, which some converters write for an id that is not there."""
    path = small(tmp_path, bytes_and(["</s>"], "gpt-2", eos_token_id=(1 << 32) - 1))
    assert stops(path) == {257}
    assert open_gguf(path).notes == []


def test_pieces_without_merges_and_without_an_unknown_token() -> None:
    """Phi 3's file has the kind llama, the rule default, scores, and no merges; others have no key for an unknown token."""
    tokens = [*BYTES, "▁", "a", "b", "▁a", "▁ab", "ab", "<|end|>"]
    scores = [0.0] * 256 + [-4.0, -5.0, -6.0, -2.0, -3.0, -1.0, 0.0]
    keys = {f"{PRE}model": "llama", f"{PRE}pre": "default", f"{PRE}tokens": tokens, f"{PRE}scores": np.array(scores, np.float32)}
    keys[f"{PRE}token_type"] = np.array([6] * 256 + [1] * 6 + [3], np.int32)
    inner = Tokenizer.from_str(files_from(keys, 16, len(tokens))["tokenizer.json"])
    assert inner.encode("ab").tokens == ["▁ab"]
    assert inner.encode("aba").tokens == ["▁ab", "a"]
    assert inner.encode("c").tokens == ["▁", "<0x63>"]
    named = {**keys, "general.name": "My Phi-3 mini", f"{PRE}tokens": [*tokens, "</s>"]}
    named[f"{PRE}scores"], named[f"{PRE}token_type"] = np.append(keys[f"{PRE}scores"], 0), np.append(keys[f"{PRE}token_type"], 3)
    stripped = Tokenizer.from_str(files_from(named, 16, len(tokens) + 1)["tokenizer.json"])
    assert stripped.encode("<|end|>  a").ids == [262, 259]
    assert inner.encode("<|end|>  a").ids == [262, 256, 256, 259]


def test_an_old_file_without_a_rule_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A byte-level BPE that was converted before there were rules is cut as llama.cpp cuts it, with a word about it."""
    keys = bytes_and([], "default")
    expected = tokenizer_from(as_read(keys), 257)
    del keys[f"{PRE}pre"]
    assert tokenizer_from(as_read(keys), 257) == expected
    path = small(tmp_path, keys)
    assert main(["generate", str(path), "--prompt=a", "--max-new-tokens=1"]) == 0
    assert "has no tokenizer.ggml.pre" in capsys.readouterr().err


def test_llama_3_begins_texts_without_a_key_for_it(tmp_path: Path) -> None:
    """Its rule does, unless the file says otherwise; a smaug-bpe, as some were converted, does not."""
    words = ["<|begin_of_text|>", "<|end_of_text|>"]
    for rule, more, expected in (("llama-bpe", {}, [257]), ("llama-bpe", {"add_bos_token": False}, []), ("smaug-bpe", {}, [])):
        keys = bytes_and(words, rule, bos_token_id=257, eos_token_id=258) | {f"{PRE}{key}": value for key, value in more.items()}
        if not more:
            del keys[f"{PRE}add_bos_token"]
        (tmp_path / "model.gguf").unlink(missing_ok=True)
        tokenizer = load_tokenizer(small(tmp_path, keys))
        assert tokenizer.encode(["th"], special=True)[0].tolist() == [*expected, 256]


def test_a_token_behind_every_text_is_read(tmp_path: Path) -> None:
    """A file whose key adds an end to texts, as of models that embed them."""
    keys = bytes_and(["<|begin_of_text|>", "<|end_of_text|>"], bos_token_id=257, eos_token_id=258, add_bos_token=True, add_eos_token=True)
    assert load_tokenizer(small(tmp_path, keys)).encode(["th"], special=True)[0].tolist() == [257, 256, 258]


def test_scaling_that_a_graph_does_not_have_refuses_the_file() -> None:
    """Long and short factors of Phi 3's long contexts are tensors beside a key that scales attention; the key alone changes a plain model."""
    keys = {"context_length": 131072, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96, "attention.head_count": 4}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 12, "rope.scaling.original_context_length": 4096}
    keys |= {"rope.scaling.attn_factor": 1.19, "attention.sliding_window": 262144}
    metadata = {"general.architecture": "phi3", **{f"phi3.{key}": value for key, value in keys.items()}}
    shapes = {"token_embd.weight": (300, 64), "blk.0.attn_norm.weight": (64,)}
    with pytest.raises(DataError, match=r"attn_factor in a.gguf must be 1, as cosines and sines are scaled by YaRN and LongRoPE only"):
        config_from(metadata, shapes, "a.gguf", rotary_factors={}, ties=False)
    plain = {key: value for key, value in metadata.items() if not key.endswith("attn_factor")}
    found = config_from_dict(config_from(plain, shapes, "a.gguf", rotary_factors={}, ties=False)[0])
    assert (found.partial_rotary_factor, found.sliding_window, found.rope_scaling) == (0.75, 262144, None)


def test_a_pointer_of_git_lfs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A repository that was cloned without its large files."""
    path = tmp_path / "model-00001-of-00005.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(StorageError, match="is a pointer of Git LFS and not the file itself; fetch it with git lfs pull"):
        open_gguf(path)
    assert main(["generate", str(path)]) == 6
    assert capsys.readouterr().err.count("\n") == 1


def test_a_number_for_each_block() -> None:
    """Equal ones are one number; others are refused with the key."""
    keys = {"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": np.array([96, 96]), "attention.head_count": 4}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count_kv": np.array([2, 2])}
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in keys.items()}}
    shapes = {"token_embd.weight": (300, 64), **{f"blk.{block}.attn_norm.weight": (64,) for block in range(2)}}
    assert config_from(metadata, shapes, "a.gguf", rotary_factors={}, ties=False)[0]["num_key_value_heads"] == 2
    metadata["llama.feed_forward_length"] = np.array([96, 128])
    with pytest.raises(DataError, match=r"llama.feed_forward_length in a.gguf must be a finite number, got"):
        config_from(metadata, shapes, "a.gguf", rotary_factors={}, ties=False)


def test_a_vocabulary_that_was_padded_to_a_round_number(tmp_path: Path) -> None:
    """Dummy tokens of the type unused, some of one word, and rows without tokens behind them."""
    keys = bytes_and(["[PAD]", "[PAD]"], "gpt-2")
    keys[f"{PRE}token_type"][257:] = [5, 5]
    tokenizer = load_tokenizer(small(tmp_path, keys, extra=5))
    assert tokenizer.vocab_size == 257
    keys[f"{PRE}token_type"][257:] = [1, 1]
    with pytest.raises(UntranslatedError, match=r"has the token '\[PAD\]' twice, as 257 and 258"):
        tokenizer_from(as_read(keys), 259)


def test_every_rule_that_converters_write_opens(tmp_path: Path) -> None:
    """gpt-4o, qwen35, tekken and others are no reason to say that a file came without a tokenizer."""
    for rule in ("default", "gpt-4o", "qwen35", "smollm2", "tekken", "deepseek-v3", "seed-coder"):
        (tmp_path / "model.gguf").unlink(missing_ok=True)
        path = small(tmp_path, bytes_and([], rule))
        assert ModelSource.open(path).has_tokenizer
        assert load_tokenizer(path).encode(["the"])[0].tolist() == [256, LETTERS.index("e")]
    assert record()["ids"].keys() >= {"default", "gpt-4o", "qwen35", "tekken"}
