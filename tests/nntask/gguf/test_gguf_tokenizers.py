"""Tokenizers through the metadata of GGUF files: byte-level BPE by its rules, SentencePiece's BPE by its scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_rules import keys_of_rule, write_small
from support.gguf_tokenizers import CORPUS, as_read, byte_level, sentence_piece
from support.tokenizers_of_others import BEGIN, END, TURN, llama3
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from nntask.data.tokenizer import ByteTokenizer, load_tokenizer
from nntask.errors import DataError
from nntask.gguf.pre_tokenizers import BY_NAME, RULES
from nntask.gguf.text_ends import ids_from
from nntask.gguf.vocabulary import UntranslatedError, files_from
from nntask.gguf.vocabulary_keys import keys_of
from nntask.hf.tokenizer_files import tokenizer_files

PRE = "tokenizer.ggml."
TOKENIZERS = {
    **{rule.name: (lambda rule=rule: byte_level(rule.name)) for rule in RULES},
    "llama": lambda: sentence_piece(has_prefix=True),
    "gemma": lambda: sentence_piece(has_prefix=False),
}


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_tokenizer_comes_back_from_its_keys_alone(tmp_path: Path, name: str) -> None:
    """Equal ids of all texts, and equal texts of all ids, without the tokenizer.json that is there besides."""
    inner = TOKENIZERS[name]()
    vocab_size = inner.get_vocab_size() + 7
    keys, _ = keys_of({"tokenizer.json": inner.to_str()}, vocab_size, begin=1, ends=(2,))
    assert keys[f"{PRE}model"] == ("llama" if name in ("llama", "gemma") else "gpt2")
    assert keys.get(f"{PRE}pre", name) == name
    assert len(keys[f"{PRE}tokens"]) == len(keys[f"{PRE}token_type"]) == vocab_size
    assert files_from(as_read(keys), 16, vocab_size)["tokenizer.json"] == inner.to_str()
    del keys["tokenizer.huggingface.json"]
    for file, text in files_from(as_read(keys), 16, vocab_size).items():
        (tmp_path / file).write_text(text)
    again = load_tokenizer(tmp_path)
    for text in CORPUS[:8]:
        ids = inner.encode(text, add_special_tokens=False).ids
        assert again.encode([text])[0].tolist() == ids
        assert again.decode(ids) == inner.decode(ids)
    assert again.vocab_size == inner.get_vocab_size()


def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    """Llama 3's begin-of-text token and an end, both ends of its texts, and no sentence about llama.cpp."""
    directory = llama3(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": BEGIN, "eos_token_id": [END, TURN]}))
    tokenizer = load_tokenizer(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    merged = {**content["model"]["vocab"], "ab": 259}
    content["model"] |= {"vocab": merged, "merges": [["a", "b"]]}
    for end in ((), (END,)):
        single = [{"SpecialToken": {"id": tokenizer.inner.id_to_token(each), "type_id": 0}} for each in (BEGIN, *end)]
        single.insert(1, {"Sequence": {"id": "A", "type_id": 0}})
        content["post_processor"]["single"] = single
        content["post_processor"]["special_tokens"] |= {
            (word := tokenizer.inner.id_to_token(each)): {"id": word, "ids": [each], "tokens": [word]} for each in (BEGIN, END)
        }
        keys, notes = keys_of({"tokenizer.json": json.dumps(content)}, 300, begin=BEGIN, ends=(END, TURN))
        assert keys[f"{PRE}add_bos_token"] is True
        assert keys.get(f"{PRE}add_eos_token", False) is bool(end)
        assert notes == []
        assert ids_from(keys, 300) == {"bos_token_id": BEGIN, "eos_token_id": [END, TURN]}
        del keys["tokenizer.huggingface.json"]
        again = Tokenizer.from_str(files_from(as_read(keys), 16, 300)["tokenizer.json"])
        assert again.encode("xab").ids == [BEGIN, *Tokenizer.from_str(json.dumps(content)).encode("xab", add_special_tokens=False).ids, *end]


def test_every_end_comes_back() -> None:
    """Any number of ends in any order, with llama.cpp's words among them or not; more than it can know are named."""
    tokens = json.loads(byte_level("gpt-2").to_str())
    words = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<a>", "<b>", "<c>", "</s>", "<|end|>", "<|return|>", "<|call|>"]
    tokens["added_tokens"] += [{**tokens["added_tokens"][0], "id": 420 + i, "content": word} for i, word in enumerate(words)]
    ids = {word: 420 + i for i, word in enumerate(words)}
    for ends in (
        [],
        ["<a>"],
        ["<a>", "<b>"],
        ["<a>", "<b>", "<c>"],
        ["<|eot_id|>", "<a>", "<|eom_id|>"],
        ["<b>", "<a>", "</s>", "<c>"],
        words,
        words[::-1],
    ):
        given = tuple(ids[word] for word in ends)
        keys, notes = keys_of({"tokenizer.json": json.dumps(tokens)}, 450, begin=None, ends=given)
        found = ids_from(as_read(keys), 450)["eos_token_id"]
        if ends:
            assert (found if isinstance(found, list) else [found]) == list(given)
        told = {keys.get(f"{PRE}{key}") for key in ("eos_token_id", "eot_token_id", "eom_token_id")}
        by_word = {ids[word] for word in [*words[:3], "</s>", "<|return|>", "<|call|>"]}  # <|end|> is none beside the last two
        lost = [word for word in ends if ids[word] not in told | by_word]
        assert [word for word in lost if word not in "".join(notes)] == []
        assert any("does not stop at" in note for note in notes) == bool(lost)


def test_ends_that_llama_cpp_knows_by_their_words() -> None:
    """A file with one end, or with a list of its own."""
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<|end|>", "</s>", "b"]
    given = {f"{PRE}model": "gpt2", f"{PRE}tokens": tokens, f"{PRE}eos_token_id": 5}
    assert ids_from(given, 6) == {"bos_token_id": None, "eos_token_id": [5, 1, 2, 3, 4]}
    assert ids_from(given, 3) == {"bos_token_id": None, "eos_token_id": [1, 2]}
    assert ids_from({**given, f"{PRE}eos_token_ids": np.array([0, 5, 0, 9])}, 6) == {"bos_token_id": None, "eos_token_id": [0, 5]}
    harmony = {**given, f"{PRE}tokens": [*tokens, "<|return|>", "<|call|>"], f"{PRE}eos_token_id": 6}
    assert ids_from(harmony, 8)["eos_token_id"] == [6, 1, 2, 4, 7]
    pieces = {f"{PRE}model": "llama", f"{PRE}tokens": ["<unk>", "<s>", "</s>"]}
    assert ids_from(pieces, 3) == {"bos_token_id": 1, "eos_token_id": 2}


def test_plain_bytes() -> None:
    """The tokenizer of models without one: its alphabet has no merges, so llama.cpp is told that there is none."""
    tokenizer = ByteTokenizer()
    keys, notes = keys_of(tokenizer_files(tokenizer, 16), 300, begin=256, ends=(256,))
    assert keys[f"{PRE}model"] == "none"
    assert "cuts texts by a rule without a name in llama.cpp (use_regex false)" in notes[0]
    inner = Tokenizer.from_str(files_from(as_read(keys), 16, 300)["tokenizer.json"])
    assert inner.encode("é a").ids == list("é a".encode())


def other_tokenizers() -> dict[str, tuple[Tokenizer, str]]:
    """Name -> (a tokenizer that llama.cpp has no keys for, what is said)."""
    spaced, whole, lower, unigram, words = (byte_level("gpt-2") for _ in range(5))
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    lower.normalizer = normalizers.Lowercase()
    unigram.model = models.Unigram([("a", -1.0), ("b", -2.0)], 0)
    words.model = models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    no_bytes = json.loads(sentence_piece(has_prefix=True).to_str())
    no_bytes["model"]["vocab"] = {token: index for token, index in no_bytes["model"]["vocab"].items() if token != "<0x0A>"}
    ends = byte_level("gpt-2")
    ends_content = json.loads(ends.to_str())
    ends_content["model"]["end_of_word_suffix"] = "</w>"
    ends_content["model"]["merges"] = []
    return {
        "prefix": (spaced, "cuts texts by a rule without a name in llama.cpp (add_prefix_space true)"),
        "no words": (whole, "(use_regex false)"),
        "lower case": (lower, "changes texts by a Lowercase"),
        "unigram": (unigram, "is a Unigram"),
        "wordpiece": (words, "is a WordPiece"),
        "no bytes": (Tokenizer.from_str(json.dumps(no_bytes)), "lacks 1 of the 256 tokens of bytes"),
        "suffix": (Tokenizer.from_str(json.dumps(ends_content)), "has end_of_word_suffix"),
    }


@pytest.mark.parametrize("name", list(other_tokenizers()))
def test_tokenizers_that_the_keys_cannot_say(name: str) -> None:
    """llama.cpp is told that there is none, which a sentence says; the tokenizer.json comes back as it was."""
    inner, words = other_tokenizers()[name]
    keys, notes = keys_of({"tokenizer.json": inner.to_str()}, 500, begin=None, ends=())
    assert keys[f"{PRE}model"] == "none"
    assert not {f"{PRE}tokens", f"{PRE}merges", f"{PRE}scores", f"{PRE}pre"} & keys.keys()
    assert words in notes[0]
    assert "nntask" in notes[0]
    assert files_from(as_read(keys), 16, 500)["tokenizer.json"] == inner.to_str()


def test_what_llama_cpp_does_otherwise_is_said() -> None:
    """Spaces that tokens take in, further tokens around a text, merges beside the scores, and normal forms."""
    inner = byte_level("gpt-2")
    inner.normalizer = normalizers.NFC()
    content = json.loads(inner.to_str())
    content["added_tokens"][0]["lstrip"] = True
    _, notes = keys_of({"tokenizer.json": json.dumps(content)}, 500, begin=None, ends=())
    assert ["keeps the spaces next to <|endoftext|>" in notes[0], "NFC" in notes[1]] == [True, True]
    inner = byte_level("qwen2")
    inner.post_processor = processors.TemplateProcessing("[A] $A [A]", special_tokens=[("[A]", 7)])
    _, notes = keys_of({"tokenizer.json": inner.to_str()}, 500, begin=None, ends=())
    assert len(notes) == 1
    assert f"which makes {inner.id_to_token(7)} TEXT {inner.id_to_token(7)}" in notes[0]
    pieces = json.loads(sentence_piece(has_prefix=True).to_str())
    pieces["model"]["merges"] = pieces["model"]["merges"][:-1]
    _, notes = keys_of({"tokenizer.json": json.dumps(pieces)}, 500, begin=None, ends=())
    assert any("merges tokens by their scores" in note for note in notes)


def broken_keys() -> dict[str, tuple[dict[str, Any], str]]:
    """Name -> (keys that change, what is said)."""
    tokens = as_read(keys_of({"tokenizer.json": byte_level("gpt-2").to_str()}, 420, begin=None, ends=())[0])[f"{PRE}tokens"]
    pieces = as_read(keys_of({"tokenizer.json": sentence_piece(has_prefix=True).to_str()}, 420, begin=None, ends=())[0])
    wrong = pieces[f"{PRE}scores"].copy()
    wrong[5] = np.nan
    types = np.ones(420, np.int32)
    return {
        "an unknown rule": ({f"{PRE}pre": "of the future"}, "cuts texts by the rule 'of the future' (tokenizer.ggml.pre), which nntask does not"),
        "a rule that is no text": ({f"{PRE}pre": 7}, "cuts texts by the rule 7"),
        "an unknown kind": ({f"{PRE}model": "bert"}, "is of the kind 'bert', and those of the kinds gpt2 and llama are read"),
        "no tokens": ({f"{PRE}tokens": []}, "has no tokenizer.ggml.tokens"),
        "no merges": ({f"{PRE}merges": None}, "has no tokenizer.ggml.merges, without which every text would fall to single bytes"),
        "empty merges": ({f"{PRE}merges": []}, "has no tokenizer.ggml.merges"),
        "merges that are numbers": ({f"{PRE}merges": types}, "has a tokenizer.ggml.merges that is no list of texts"),
        "a token twice": ({f"{PRE}tokens": [*tokens[:300], "a", *tokens[301:]]}, "has the token 'a' twice"),
        "few types": ({f"{PRE}token_type": types[:-1]}, "must be 420 whole numbers, one for each token, got 419 of int32"),
        "types that are switches": ({f"{PRE}token_type": types.astype(bool)}, "got 420 of bool"),
        "types that are floats": ({f"{PRE}token_type": types.astype(np.float32)}, "got 420 of float32"),
        "scores of bytes": (
            {**pieces, f"{PRE}scores": np.ones(420, np.uint8)},
            "scores that must be 420 finite numbers, one for each token, got 420 of uint8",
        ),
        "scores of switches": ({**pieces, f"{PRE}scores": np.ones(420, bool)}, "got 420 of bool"),
        "a score that is no number": ({**pieces, f"{PRE}scores": wrong}, "finite numbers"),
        "no scores": ({**pieces, f"{PRE}scores": None}, "got None"),
    }


@pytest.mark.parametrize("name", list(broken_keys()))
def test_what_is_broken_is_told(name: str) -> None:
    """A reason that completes "the tokenizer in FILE ..."."""
    changed, words = broken_keys()[name]
    keys = as_read(keys_of({"tokenizer.json": byte_level("gpt-2").to_str()}, 420, begin=None, ends=())[0]) | changed
    keys = {key: value for key, value in keys.items() if value is not None and key != "tokenizer.huggingface.json"}
    with pytest.raises(UntranslatedError) as caught:
        files_from(keys, 16, 420)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("merge", ["ab", "", " ", "a", "a ", "a \x00", "a b c", "zz zz"])
def test_a_merge_of_no_tokens_is_told(tmp_path: Path, merge: str) -> None:
    """Not in the words of the tokenizers package."""
    keys = keys_of_rule("gpt-2", ["t h", merge])
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"][:257], "x" * 9]
    path = write_small(tmp_path / "model.gguf", keys, 258)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    told = f"the tokenizer in {path} has the merge {merge!r} in tokenizer.ggml.merges, and a merge is two tokens that make a third one; name its"
    assert told in str(caught.value)


def test_what_is_not_believed() -> None:
    """A tokenizer.json of other tokens beside the keys."""
    keys = as_read(keys_of({"tokenizer.json": byte_level("gpt-2").to_str()}, 420, begin=None, ends=())[0])
    other = {**keys, "tokenizer.huggingface.json": byte_level("smollm").to_str().replace('"!"', '"?"')}
    assert files_from(other, 16, 420)["tokenizer.json"] != other["tokenizer.huggingface.json"]
    for text in ("", "[]", "{", "[" * 100_000, '{"model": {"vocab": {"a": -1}}}', '{"model": {"vocab": {"a": 1e9}}}', '{"model": {"vocab": {}}}'):
        assert files_from({**keys, "tokenizer.huggingface.json": text}, 16, 420)["tokenizer.json"] != text
        assert files_from({f"{PRE}model": "none", "tokenizer.huggingface.json": text}, 16, 420) == {}
    assert files_from({}, 16, 420) == {}


def test_names_of_rules() -> None:
    """Every name once, and every expression is one that the tokenizers package takes."""
    names = [name for rule in RULES for name in (rule.name, *rule.others)]
    assert sorted(names) == sorted(BY_NAME)
