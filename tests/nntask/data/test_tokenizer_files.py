"""The files of tokenizers of others: every text has the ids that transformers' AutoTokenizer gives it, or the files are refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.splitters import trained
from tokenizers import Tokenizer, models, processors

from nntask.data import load_tokenizer
from nntask.data.encoding import RowEncoder
from nntask.data.foreign_tokenizer import has_tokenizer
from nntask.data.tokenizer_keys import IGNORED, USED
from nntask.errors import DataError

TEXTS = ("the cat extra <x> naïve", "<|extra|> cat", " <s>the  cat</s> [PAD]", "a<img>b <|extra|><|two|>", "", "THE Cat\n\n12 <mask> e\u0301")


def written(directory: Path, name: str = "gpt2", **files: Any) -> Path:
    """A directory with a small tokenizer.json and JSON files, `__` for a dot in their names."""
    directory.mkdir(exist_ok=True)
    inner = trained(name)
    inner.save(str(directory / "tokenizer.json"))
    for key, values in {"tokenizer_config__json": {"tokenizer_class": "PreTrainedTokenizerFast"}, **files}.items():
        (directory / key.replace("__", ".")).write_text(json.dumps(values))
    return directory


def assert_like_transformers(directory: Path) -> transformers.PreTrainedTokenizerBase:
    """Ids of all texts, alone and with what is put around them, and the number of ids."""
    ours, theirs = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        for special in (False, True):
            found = ours.encode([text], special=special)[0].tolist()
            assert found == theirs(text, add_special_tokens=special)["input_ids"], (text, special)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    (directory / "kept").mkdir()
    ours.save(directory / "kept")
    again = load_tokenizer(directory / "kept")
    assert [again.encode([text], special=True)[0].tolist() for text in TEXTS] == [ours.encode([text], special=True)[0].tolist() for text in TEXTS]
    return theirs


def token(content: str, **flags: bool) -> dict[str, Any]:
    """An entry of added_tokens_decoder."""
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False), **flags}


NUM_IDS = 666
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ADDED: Mapping[str, Mapping[str, Any]] = {
    "decoder": {"tokenizer_config__json": {**FAST, "added_tokens_decoder": {str(NUM_IDS): token("<|extra|>", special=True)}}},
    "decoder of a word": {"tokenizer_config__json": {**FAST, "added_tokens_decoder": {str(NUM_IDS): token("<|extra|>", lstrip=True, rstrip=True)}}},
    "decoder in another order": {
        "tokenizer_config__json": {**FAST, "added_tokens_decoder": {str(NUM_IDS + 1): token("<|two|>"), str(NUM_IDS): token("<|extra|>")}}
    },
    "decoder with other flags for a known token": {
        "tokenizer_config__json": {**FAST, "added_tokens_decoder": {"1": token("<s>", rstrip=True, special=True)}}
    },
    "a role": {"tokenizer_config__json": {**FAST, "pad_token": "[PAD]"}},
    "a role of an object": {"tokenizer_config__json": {**FAST, "pad_token": {"__type": "AddedToken", **token("[PAD]", lstrip=True)}}},
    "a role of other inputs": {"tokenizer_config__json": {**FAST, "image_token": "<img>"}},
    "a list": {"tokenizer_config__json": {**FAST, "additional_special_tokens": ["<|extra|>", "<img>"]}},
    "a list under its new name": {"tokenizer_config__json": {**FAST, "extra_special_tokens": ["<|extra|>"], "pad_token": "[PAD]"}},
    "an object of roles": {"tokenizer_config__json": {**FAST, "extra_special_tokens": {"image_token": "<img>", "two_token": "<|two|>"}}},
    "a map": {"special_tokens_map__json": {"pad_token": "[PAD]", "mask_token": {**token("<mask>", lstrip=True), "special": True}}},
    "a map with a list": {"special_tokens_map__json": {"additional_special_tokens": ["<|extra|>"]}},
    "a map beside a decoder is not read": {
        "special_tokens_map__json": {"pad_token": "[PAD]"},
        "tokenizer_config__json": {**FAST, "added_tokens_decoder": {str(NUM_IDS): token("<|extra|>")}},
    },
    "a file": {"added_tokens__json": {"<|extra|>": NUM_IDS, "<|two|>": NUM_IDS + 1}},
    "a file and a role": {"added_tokens__json": {"[PAD]": NUM_IDS}, "tokenizer_config__json": {**FAST, "pad_token": "[PAD]"}},
    "a file beside a decoder is not read": {
        "added_tokens__json": {"<|two|>": 9000},
        "tokenizer_config__json": {**FAST, "added_tokens_decoder": {str(NUM_IDS): token("<|extra|>")}},
    },
    "split": {"tokenizer_config__json": {**FAST, "split_special_tokens": True}},
    "nothing": {},
}


@pytest.mark.parametrize("case", ADDED)
def test_added_tokens_are_known(case: str, tmp_path: Path) -> None:
    """Wherever they are declared, with their flags; saved elsewhere the tokenizer gives the same ids."""
    assert_like_transformers(written(tmp_path / "m", **ADDED[case]))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config__json": {"added_tokens_decoder": {"900": token("<|extra|>")}}}, r"'<\|extra\|>' the id 900, and after .* would be 666"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"5": token("<|extra|>")}}}, r"the id 5, and"),
        ({"added_tokens__json": {"<|extra|>": 900}}, "the id 900, and"),
        ({"tokenizer_config__json": {"added_tokens_decoder": []}}, r"must map ids to tokens, got \[\]"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"x": token("a")}}}, "has 'x' as the id"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"666": {"content": ""}}}}, "an added token of an unknown form"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"666": {"content": "a", "lstrip": 1}}}}, "an added token of an unknown form"),
        ({"added_tokens__json": {"<|extra|>": -1}}, "has -1 as the id"),
    ],
)
def test_declarations_that_contradict_are_refused(files: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    """An id that the next free one is not, and entries that are no tokens."""
    with pytest.raises(DataError, match=words):
        load_tokenizer(written(tmp_path / "m", **files))


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_and_padding_of_a_training_script_are_off(side: str, tmp_path: Path) -> None:
    """Texts, prompts and rows have all their tokens and no others; the token before a text is found behind padding; what is saved has neither."""
    directory = written(tmp_path / "m", tokenizer_config__json={**FAST, "bos_token": "<s>", "eos_token": "</s>"})
    inner = Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.enable_truncation(16, direction=side)
    inner.enable_padding(direction=side, length=40, pad_id=2, pad_token="</s>")
    inner.save(str(directory / "tokenizer.json"))
    text = "the cat " * 100
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    for special in (False, True):
        assert ours.encode([text], special=special)[0].tolist() == theirs(text, add_special_tokens=special)["input_ids"]
    assert RowEncoder(ours).text(text, 10_000).tolist() == theirs(text)["input_ids"]
    assert (ours.begin_of_text, ours.end_of_text) == (1, 2)
    assert_like_transformers(directory)
    saved = json.loads((directory / "kept" / "tokenizer.json").read_text())
    assert (saved["truncation"], saved["padding"]) == (None, None)


def test_dropout_of_merges_is_off_and_said(tmp_path: Path) -> None:
    """Else a text would have other tokens each time, and no cache, resume or score would mean anything."""
    directory = written(tmp_path / "m")
    values = json.loads((directory / "tokenizer.json").read_text())
    values["model"]["dropout"] = 0.5
    (directory / "tokenizer.json").write_text(json.dumps(values))
    values["model"]["dropout"] = None
    certain = Tokenizer.from_str(json.dumps(values))
    found = load_tokenizer(directory)
    assert found.notes == ("tokenizer.json drops 50% of its merges at random; that is off here, so a text always has the same tokens",)
    assert found.encode(["the cat the cat"])[0].tolist() == certain.encode("the cat the cat").ids


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("bert", {"do_lower_case": False}, "do_lower_case in tokenizer_config.json of .* is false, and tokenizer.json has it true"),
        ("bert", {"strip_accents": False}, "strip_accents .* is false"),
        ("bert", {"tokenize_chinese_chars": False}, "tokenize_chinese_chars .* is false"),
        ("gpt2", {"add_prefix_space": True}, "add_prefix_space .* is true, and tokenizer.json has it false"),
        ("gpt2 prefix", {"add_prefix_space": False}, "add_prefix_space .* is false"),
        ("llama2", {"add_prefix_space": False}, "add_prefix_space .* is false"),
        ("mistral", {"add_prefix_space": False}, "add_prefix_space .* is false"),
        ("gpt2", {"fix_mistral_regex": True}, "replaces the rule of tokenizer.json"),
    ],
)
def test_a_key_that_contradicts_tokenizer_json_is_refused(name: str, config: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    """Where some version of transformers gives a text other tokens for it; the value that agrees is read."""
    with pytest.raises(DataError, match=words):
        load_tokenizer(written(tmp_path / "m", name, tokenizer_config__json=config))
    load_tokenizer(written(tmp_path / "n", name, tokenizer_config__json={key: not value for key, value in config.items()}))


def test_what_is_not_followed_is_named(tmp_path: Path) -> None:
    """Tokens around a text follow tokenizer.json, as in transformers; keys that are not known are named once, known ones never."""
    config = {**FAST, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False, "model_max_length": 10, "legacy": True}
    directory = written(tmp_path / "m", tokenizer_config__json={**config, "sparkle": 1, "glitter": {}}, special_tokens_map__json={"odd": "x"})
    assert load_tokenizer(directory).notes == (
        "add_bos_token in tokenizer_config.json is true and is not followed: tokenizer.json puts no <s> before a text",
        "tokenizer_config.json has sparkle, glitter, which are not known here and not used",
        "special_tokens_map.json has odd, which is not known here and not used",
    )
    (directory / "special_tokens_map.json").unlink()
    assert_like_transformers(directory)


def test_keys_that_transformers_writes_are_all_known(tmp_path: Path) -> None:
    """A tokenizer that transformers saved has nothing to say."""
    for name in ("gpt2", "bert", "llama2"):
        there = transformers.AutoTokenizer.from_pretrained(written(tmp_path / name, name, tokenizer_config__json={**FAST, "eos_token": "</s>"}))
        there.save_pretrained(tmp_path / "saved" / name)
        assert load_tokenizer(tmp_path / "saved" / name).notes == ()


REAL = {
    "Qwen 2.5": "add_bos_token add_prefix_space added_tokens_decoder additional_special_tokens bos_token chat_template clean_up_tokenization_spaces "
    "eos_token errors model_max_length pad_token split_special_tokens tokenizer_class unk_token",
    "Gemma 3": "add_bos_token add_eos_token added_tokens_decoder boi_token bos_token clean_up_tokenization_spaces eoi_token eos_token "
    "extra_special_tokens image_token model_max_length pad_token processor_class sp_model_kwargs spaces_between_special_tokens tokenizer_class "
    "unk_token use_default_system_prompt chat_template",
    "Llama 2": "add_bos_token add_eos_token bos_token chat_template clean_up_tokenization_spaces eos_token legacy model_max_length pad_token "
    "padding_side sp_model_kwargs tokenizer_class unk_token use_default_system_prompt",
    "BERT": "do_lower_case model_max_length cls_token sep_token mask_token unk_token never_split do_basic_tokenize name_or_path "
    "special_tokens_map_file strip_accents tokenize_chinese_chars tokenizer_class max_len",
    "T5": "additional_special_tokens extra_ids sp_model_kwargs legacy eos_token unk_token pad_token model_max_length",
}


@pytest.mark.parametrize("model", REAL)
def test_keys_of_published_files_are_all_known(model: str) -> None:
    """Each is used, or ignored with a reason."""
    for key in REAL[model].split():
        assert key in USED or IGNORED.get(key) or key.endswith("_token"), key
    assert not USED & set(IGNORED)


OLD: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "opt": (
        "gpt2",
        {"config__json": {"model_type": "opt"}, "tokenizer_config__json": {"add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>"}},
    ),
    "opt, roles in the map": (
        "gpt2",
        {
            "config__json": {"model_type": "opt"},
            "tokenizer_config__json": {"errors": "replace", "add_bos_token": True, "add_prefix_space": False, "tokenizer_class": "GPT2Tokenizer"},
            "special_tokens_map__json": {name: token("</s>", normalized=True) for name in ("bos_token", "eos_token", "unk_token")}
            | {"pad_token": "<s>"},
        },
    ),
    "gpt2": ("gpt2", {"tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}}),
    "gpt2 by its config": ("gpt2", {"config__json": {"model_type": "gpt2"}}),
    "gpt2 with a prefix": ("gpt2", {"tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}),
    "gpt2 with an end": ("gpt2", {"tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer", "add_eos_token": True, "eos_token": "</s>"}}),
    "roberta": ("gpt2", {"config__json": {"model_type": "roberta"}, "tokenizer_config__json": {"tokenizer_class": "RobertaTokenizer"}}),
    "bart": ("gpt2", {"config__json": {"model_type": "bart"}, "added_tokens__json": {}}),
    "qwen2": ("qwen2 nfc", {"tokenizer_config__json": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>", "pad_token": "</s>"}}),
    "bert": ("bert", {"config__json": {"model_type": "bert"}}),
    "bert, cased": ("bert", {"tokenizer_config__json": {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": True}}),
    "electra": ("bert", {"config__json": {"model_type": "electra"}, "tokenizer_config__json": {"tokenizer_class": "ElectraTokenizer"}}),
}


def old_directory(directory: Path, name: str, files: Mapping[str, Any]) -> Path:
    """A directory as repositories had them before tokenizer.json: a vocabulary, and files that say whose it is."""
    directory.mkdir()
    inner = trained(name)
    model = json.loads(inner.to_str())["model"]
    vocab = dict(model["vocab"])
    if name == "bert":
        words = [*vocab, "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
        (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    else:
        for word in ("<pad>", "<mask>", "<|endoftext|>"):
            vocab.setdefault(word, len(vocab))
        (directory / "vocab.json").write_text(json.dumps(vocab))
        (directory / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    for key, values in files.items():
        (directory / key.replace("__", ".")).write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize("case", OLD)
def test_vocabularies_without_a_tokenizer_json_are_read(case: str, tmp_path: Path) -> None:
    """By the rule of the class that the files name; what is saved has a tokenizer.json with the same ids."""
    name, files = OLD[case]
    directory = old_directory(tmp_path / "m", name, files)
    assert has_tokenizer(directory)
    assert_like_transformers(directory)


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        (
            "gpt2",
            {"tokenizer_config__json": {"tokenizer_class": "CLIPTokenizer"}},
            r"vocab.json and merges.txt and no tokenizer.json, and nntask does not know how a CLIPTokenizer",
        ),
        ("bert", {"config__json": {"model_type": "gpt2"}}, r"has vocab.txt and no tokenizer.json, and nntask does not know how a gpt2"),
    ],
)
def test_vocabularies_of_other_rules_are_refused_with_a_command(name: str, files: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    """The command writes a tokenizer.json."""
    with pytest.raises(DataError, match=words + r".*AutoTokenizer as A"):
        load_tokenizer(old_directory(tmp_path / "m", name, files))


def test_a_sentencepiece_model_alone_is_refused_with_a_command(tmp_path: Path) -> None:
    """It is no tokenizer.json, and the command makes one."""
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(DataError, match=r"tokenizer.model and no tokenizer.json; write one with: python -c .*save_pretrained"):
        load_tokenizer(tmp_path)


def test_broken_vocabularies_are_refused(tmp_path: Path) -> None:
    """With the names of both files."""
    directory = old_directory(tmp_path / "m", "gpt2", {})
    (directory / "merges.txt").write_text("a b c d\n")
    with pytest.raises(DataError, match=r"vocab.json and .*merges.txt are not a vocabulary: .*; copy the files again"):
        load_tokenizer(directory)


def test_a_file_of_a_newer_library_says_which_version_is_here(tmp_path: Path) -> None:
    """A model type that the library does not know."""
    inner = json.loads(Tokenizer(models.BPE()).to_str())
    inner["model"]["type"] = "Quantum"
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    with pytest.raises(DataError, match=r"is not a tokenizer file: .*update the tokenizers package, which is \d+\.\d+\.\d+ here"):
        load_tokenizer(tmp_path)
