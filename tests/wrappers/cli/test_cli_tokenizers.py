"""Tokenizers of others through the command line: more ids than rows, ids of defaults, older vocabularies, a tokenizer that changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from support.commands import refuse as refusal
from support.model_directories import TEXT, losses, write_model
from tokenizers import AddedToken, Tokenizer

from nntask.data import load_tokenizer
from nntask.data.tokenizer import train_bpe
from nntask.io.block_checksums import block_checksums
from wrappers.cli import main

TRAIN = ["train", "--init-from=start", "--dataset=text", "--dataset-path=text.txt", "--batch=4", "--steps=2", "--lr=1e-3", "--ncpu=1"]
NUM_ROWS = 300  # of the model


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with a model to start from and text."""
    write_model(folder / "start")
    (folder / "text.txt").write_text(TEXT)
    return folder


def refuse(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence on stderr of a command that is refused with an exit code."""
    found, sentence = refusal(capsys, argv)
    assert found == code
    return str(sentence)


def add(directory: Path, *, until: int, words: list[str]) -> None:
    """Add tokens to a tokenizer.json, the last one with the id `until`."""
    inner = Tokenizer.from_file(str(directory / "tokenizer.json"))
    free = until + 1 - max(inner.get_vocab().values()) - 1 - len(words)
    inner.add_tokens([AddedToken(f"<unused{number}>", special=True) for number in range(free)])
    inner.add_tokens([AddedToken(word, special=True) for word in words])
    inner.save(str(directory / "tokenizer.json"))
    assert inner.token_to_id(words[-1]) == until


def test_a_tokenizer_with_a_token_without_a_row_is_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of Gemma 3, whose last id has no row: training, validation, generation, perplexity, export and GGUF give what they give without it."""
    assert main([*TRAIN, "--run-dir=plain", "--sample-tokens=4"]) == 0
    assert main(["perplexity", "start", "--dataset=text", "--dataset-path=text.txt", "--json"]) == 0
    assert main(["generate", "start", "--prompt=some words", "--max-new-tokens=5", "--temperature=0", "--json"]) == 0
    assert main(["quantize", "start", "plain.gguf", "--type=f32"]) == 0
    before = capsys.readouterr().out
    add(here / "start", until=NUM_ROWS, words=["<image_soft_token>"])
    assert load_tokenizer("start").vocab_size == NUM_ROWS + 1
    assert main([*TRAIN, "--run-dir=more", "--sample-tokens=4"]) == 0
    assert losses(here / "plain") == losses(here / "more")
    assert main(["perplexity", "start", "--dataset=text", "--dataset-path=text.txt", "--json"]) == 0
    assert main(["generate", "start", "--prompt=some words", "--max-new-tokens=5", "--temperature=0", "--json"]) == 0
    assert main(["quantize", "start", "more.gguf", "--type=f32"]) == 0
    after = capsys.readouterr().out
    for name in ('"loss":', '"text":'):
        found = [next(json.loads(line) for line in out.splitlines() if name in line) for out in (before, after)]
        assert {**found[0], "seconds": 0} == {**found[1], "seconds": 0}
    texts = []
    for file in ("plain.gguf", "more.gguf"):
        assert main(["generate", file, "--prompt=some words", "--max-new-tokens=5", "--temperature=0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert load_tokenizer("more.gguf").vocab_size == NUM_ROWS + 1
    assert main(["export", "more", "out"]) == 0
    assert transformers.AutoTokenizer.from_pretrained(here / "out").convert_tokens_to_ids("<image_soft_token>") == NUM_ROWS


def test_a_token_without_a_row_is_named_where_it_occurs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In prompts and texts, with what to do."""
    add(here / "start", until=NUM_ROWS, words=["<image_soft_token>"])
    prompt = "--prompt=some <image_soft_token> words"
    words = "has the token <image_soft_token> with the id 300, and the model's vocabulary has the ids 0 to 299; leave it out of the text, or"
    assert f"the prompt {words}" in refuse(["generate", "start", prompt, "--max-new-tokens=5"], 2, capsys)
    (here / "text.txt").write_text(TEXT + "see <image_soft_token>\n")
    assert f"text.txt, line 201, {words}" in refuse([*TRAIN, "--run-dir=run"], 4, capsys)
    assert f"text.txt, line 201, {words}" in refuse(["perplexity", "start", "--dataset=text", "--dataset-path=text.txt"], 4, capsys)
    (here / "text.txt").write_text(TEXT)
    assert f"--prompt, with the token before a text, {words}" in refuse([*TRAIN, "--run-dir=run", prompt], 4, capsys)
    assert main([*TRAIN, "--run-dir=run", "--sample-tokens=0"]) == 0
    assert f"the prompt {words}" in refuse(["generate", "run", prompt, "--max-new-tokens=5"], 2, capsys)


@pytest.mark.parametrize(("begin", "end"), [(50256, 50256), (-1, -1), (1, [2, -1, 50256]), (None, [50256, 50257])])
def test_ids_of_defaults_that_the_model_has_no_row_for_never_come(
    here: Path, begin: int | None, end: int | list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that keeps transformers' ids, or the -1 of older files: the text of transformers, whose end never comes either."""
    values = json.loads((here / "start" / "config.json").read_text())
    (here / "start" / "config.json").write_text(json.dumps({**values, "bos_token_id": begin, "eos_token_id": end}))
    (here / "start" / "generation_config.json").write_text(json.dumps({"bos_token_id": begin, "eos_token_id": end}))
    assert main(["generate", "start", "--prompt=some words", "--max-new-tokens=8", "--temperature=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = transformers.AutoModelForCausalLM.from_pretrained(here / "start")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(here / "start" / "tokenizer.json"))
    ids = tokenizer("some words", return_tensors="pt")
    known = [each for each in (end if isinstance(end, list) else [end]) if 0 <= each < NUM_ROWS]
    wanted = model.generate(**ids, max_new_tokens=8, do_sample=False, eos_token_id=known or None, pad_token_id=0)[0]
    assert found["text"] == tokenizer.decode(wanted[: ids["input_ids"].shape[1] + found["tokens"]])
    assert found["tokens"] == len(wanted) - ids["input_ids"].shape[1] - (found["end"] == "stop")
    if begin is None or not 0 <= begin < NUM_ROWS:
        capsys.readouterr()  # transformers shows its progress
        words = "an empty prompt needs a bos_token_id in config.json that the model has a row for, and there is none"
        assert words in refuse(["generate", "start", "--max-new-tokens=4"], 2, capsys)


@pytest.mark.parametrize("value", ["x", 1.5, True, [1, "x"]])
def test_ids_that_are_none_are_refused(here: Path, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Of another type than a number."""
    (here / "start" / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert "eos_token_id in start must be an id or a list of ids, got" in refuse(["generate", "start", "--prompt=a"], 4, capsys)


def test_a_directory_with_vocab_and_merges_is_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As older repositories have it: the same losses and texts as with its tokenizer.json, and the export has one."""
    assert main([*TRAIN, "--run-dir=new", "--sample-tokens=0"]) == 0
    shutil.copytree(here / "start", here / "kept")
    model = json.loads((here / "start" / "tokenizer.json").read_text())["model"]
    (here / "start" / "tokenizer.json").unlink()
    (here / "start" / "vocab.json").write_text(json.dumps(model["vocab"]))
    (here / "start" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    assert main([*TRAIN, "--run-dir=old", "--sample-tokens=0"]) == 0
    assert losses(here / "new") == losses(here / "old")
    capsys.readouterr()
    texts = []
    for directory in ("start", "kept"):
        assert main(["generate", directory, "--prompt=some words", "--max-new-tokens=6", "--temperature=0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["train", "--resume=old", "--steps=3", "--sample-tokens=0"]) == 0
    assert main(["export", "old", "out"]) == 0
    assert (
        transformers.AutoTokenizer.from_pretrained(here / "out")("some words")["input_ids"]
        == load_tokenizer("kept").encode(["some words"])[0].tolist()
    )


def test_a_continued_run_keeps_its_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One trained on the data, and another one in the cache, as of another version of tokenizers: the checkpoint's counts; the same one goes on."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "small.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 280, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3})
    )
    flags = ["train", "--config-path=small.json", "--dataset=text", "--dataset-path=text.txt", "--batch=4", "--ncpu=1", "--sample-tokens=0"]
    assert main([*flags, "--steps=2", "--run-dir=run"]) == 0
    assert main(["train", "--resume=run", "--steps=3", "--sample-tokens=0"]) == 0
    (data,) = Path(os.environ["NNTASK_CACHE"]).glob("data/text-*")
    (data / "train.bin").unlink()
    train_bpe(["quite another text " * 50], 280).save(data)
    (data / "tokenizer.crc32").write_text(block_checksums(data / "tokenizer.json"))
    capsys.readouterr()
    words = refuse(["train", "--resume=run", "--steps=4", "--sample-tokens=0"], 4, capsys)
    assert "was trained with its tokenizer.json, and the tokenizer of" in words
    assert "is another one now, so texts would have other ids; restore it, or start a new run" in words


def test_notes_about_a_tokenizer_are_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that reads it, once; and the figures are in summary.json."""
    (here / "start" / "tokenizer_config.json").write_text(json.dumps({"sparkle": 1}))
    note = "tokenizer: tokenizer_config.json has sparkle, which is not known here and not used"
    assert main(["generate", "start", "--prompt=some words", "--max-new-tokens=2"]) == 0
    assert capsys.readouterr().err.count(note) == 1
    assert main([*TRAIN, "--run-dir=run", "--sample-tokens=0"]) == 0
    assert capsys.readouterr().out.count(note) == 1
    assert json.loads((here / "run" / "summary.json").read_text())["data"]["tokenizer_notes"] == {"number": 1, "total": 0}
    assert main(["perplexity", "start", "--dataset=text", "--dataset-path=text.txt"]) == 0
    assert capsys.readouterr().err.count(note) == 1
    assert main(["data", "prepare", "--dataset=text", "--dataset-path=text.txt", "--tokenizer-path=start", "--output=out"]) == 0
    assert capsys.readouterr().out.count(note.removeprefix("tokenizer: ")) == 1
    assert np.fromfile(here / "out" / "train.bin", np.uint16).max() < NUM_ROWS
