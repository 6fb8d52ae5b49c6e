"""Situations of public reports about tokenizers and token files of other projects, set up on small files; the table is in docs/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from support.splitters import trained
from tokenizers import AddedToken, Tokenizer, processors

from nntask.data import DataSpec, load_tokenizer, open_dataset
from nntask.errors import DataError

FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}


def written(directory: Path, inner: Tokenizer, **config: Any) -> Path:
    """A directory with a tokenizer.json and its tokenizer_config.json."""
    directory.mkdir()
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**FAST, **config}))
    return directory


def assert_equal(directory: Path, *texts: str) -> None:
    """The ids of transformers' AutoTokenizer."""
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    for text in texts:
        assert ours.encode([text])[0].tolist() == theirs(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize("name", ["llama2", "mistral", "gpt2"])
def test_chat_tokens_added_to_a_sentencepiece_tokenizer(name: str, tmp_path: Path) -> None:
    """Spaces and line feeds around tokens that were added for chats are those that transformers' fast tokenizer leaves."""
    inner = trained(name)
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.add_tokens([AddedToken("token_1", normalized=True), AddedToken("<end_of_turn>", rstrip=True, normalized=False)])
    where = written(tmp_path / "m", inner)
    assert_equal(where, "<|im_start|>the cat\nsat<|im_end|>\n<|im_start|> cat", "\ntoken_1", "the <end_of_turn> \n cat", " <|im_end|> ")


def test_a_padding_token_added_for_batches_has_no_row(tmp_path: Path) -> None:
    """It is in no text, so texts are encoded; a text that has it is refused with its name."""
    where = written(tmp_path / "m", trained("gpt2"), pad_token="[PAD]")
    num_rows = load_tokenizer(where).vocab_size - 1
    assert load_tokenizer(where).word(num_rows) == "[PAD]"
    (tmp_path / "t.txt").write_text("the cat\n")
    spec = DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(where), vocab_size=num_rows)
    assert open_dataset(spec).train.path.is_file()
    (tmp_path / "t.txt").write_text("the cat\n\n[PAD]")
    with pytest.raises(DataError, match=r"t.txt, line 3, has the token \[PAD\]"):
        open_dataset(spec)


def test_a_vocabulary_ends_with_a_blank_line(tmp_path: Path) -> None:
    """vocab.txt with an empty last line: as many ids as transformers has, and the same ones."""
    words = [*json.loads(trained("bert").to_str())["model"]["vocab"], "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert_equal(tmp_path, "the cat extra", "THE")
    assert load_tokenizer(tmp_path).vocab_size == max(transformers.AutoTokenizer.from_pretrained(tmp_path).get_vocab().values()) + 1


def test_runs_of_spaces_are_added_tokens_of_an_older_repository(tmp_path: Path) -> None:
    """vocab.json with merges.txt, and added_tokens.json with runs of spaces behind its last id."""
    model = json.loads(trained("gpt2").to_str())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    (tmp_path / "added_tokens.json").write_text(json.dumps({" " * (12 - number): len(vocab) + number for number in range(10)}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CodeGenTokenizer", "add_prefix_space": False}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "codegen"}))
    assert_equal(tmp_path, "def f():\n        return 1", "a  b", " " * 30 + "x")


def test_an_end_of_text_id_that_equals_the_number_of_rows(tmp_path: Path) -> None:
    """A published config has vocab_size 52000 and the end-of-text id 52000: named before the training instead of an index error in it."""
    inner = trained("gpt2")
    inner.add_special_tokens(["<|end|>"])
    where = written(tmp_path / "m", inner, eos_token="<|end|>")
    (tmp_path / "t.txt").write_text("the cat")
    num_rows = load_tokenizer(where).vocab_size - 1
    with pytest.raises(DataError, match=rf"every text, at its beginning or end, has the token <\|end\|> with the id {num_rows}"):
        open_dataset(DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(where), vocab_size=num_rows))


def test_an_end_of_text_that_the_config_asks_for_in_vain(tmp_path: Path) -> None:
    """add_eos_token of a tokenizer whose template has none: no end, as in transformers, and said."""
    where = written(tmp_path / "m", trained("gpt2"), add_eos_token=True)
    assert_equal(where, "the cat")
    assert load_tokenizer(where).notes == (
        "add_eos_token in tokenizer_config.json is true and is not followed: tokenizer.json puts no </s> after a text",
    )


def test_ids_wrapped_to_two_bytes_are_suspected(tmp_path: Path) -> None:
    """A script cast ids of a vocabulary of 119,547 to uint16: the file cannot hold them, which a run says once."""
    where = written(tmp_path / "m", trained("gpt2"))
    values = json.loads((where / "tokenizer.json").read_text())
    values["model"]["vocab"]["last"] = 119_546
    (where / "tokenizer.json").write_text(json.dumps(values))
    ids = np.random.default_rng(0).integers(0, 119_547, 4000).astype(np.uint16)
    ids.tofile(where / "train.bin")
    (found,) = open_dataset(DataSpec("train.bin", str(where), vocab_size=119_547)).findings
    assert found.key == "ids_of_two_bytes"
    assert "train.bin holds ids of two bytes, and its tokenizer has 119,547 ids, of which those from 65,536 do not fit" in found.sentence
    (where / "train.bin.json").write_text('{"dtype": "uint16"}')
    assert open_dataset(DataSpec("train.bin", str(where), vocab_size=119_547)).findings == ()


def test_a_tokenizer_that_git_has_not_fetched(tmp_path: Path) -> None:
    """A clone without Git LFS has three lines in the place of the file."""
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DataError, match=r"tokenizer.json is a pointer of Git LFS and not the file; fetch it with git lfs pull"):
        load_tokenizer(tmp_path)


def test_one_token_begins_and_ends_texts(tmp_path: Path) -> None:
    """add_bos_token and add_eos_token are told apart where both tokens are one; a template that agrees has no note."""
    inner = trained("gpt2")
    inner.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    flags = {"bos_token": "</s>", "add_bos_token": True, "add_eos_token": False}
    assert load_tokenizer(written(tmp_path / "m", inner, **flags)).notes == ()


def test_a_mark_inside_a_text_stays(tmp_path: Path) -> None:
    """U+FEFF within a corpus is a character of it, as in `tokenizers`; at its head it is none."""
    where = written(tmp_path / "m", trained("gpt2"))
    (tmp_path / "t.txt").write_text("\ufeffone\n\ufefftwo", encoding="utf-8")
    found = open_dataset(DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(where), vocab_size=2000)).train
    wanted = Tokenizer.from_file(str(where / "tokenizer.json")).encode("one\n\ufefftwo").ids
    assert found.window(0, found.num_tokens).tolist() == [*wanted, 2]


def test_words_of_the_vocabulary_beyond_the_rows_are_no_added_tokens(tmp_path: Path) -> None:
    """A code model of 32,000 rows whose tokenizer.json has marks of infilling in its vocabulary: used until a text has one."""
    inner = trained("llama2")
    values = json.loads(inner.to_str())
    num_rows = max(inner.get_vocab().values()) + 1
    values["model"]["vocab"] |= {"▁<PRE>": num_rows, "▁<MID>": num_rows + 1}
    values["added_tokens"] += [
        {"id": num_rows, "content": "▁<PRE>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ]
    where = written(tmp_path / "m", Tokenizer.from_str(json.dumps(values)))
    assert_equal(where, "the ▁<PRE> cat", "<PRE>", "the cat")
    (tmp_path / "t.txt").write_text("the cat ▁<PRE> sat")
    with pytest.raises(DataError, match=r"t\.txt, line 1, has the token ▁<PRE>"):
        open_dataset(DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(where), vocab_size=num_rows))
