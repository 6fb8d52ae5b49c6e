"""Hugging Face directories through the command line: start from one, export one, and plain refusals."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.commands import refuse
from support.model_directories import CONFIG, TEXT, losses, write_model
from tokenizers.processors import TemplateProcessing

from nntask.data.tokenizer import load_tokenizer
from nntask.models.gpt2 import GPT2
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from wrappers.cli import main

BASE = [
    "train",
    "--init-from=start",
    "--dataset=text",
    "--dataset-path=text.txt",
    "--batch=4",
    "--steps=2",
    "--lr=1e-3",
    "--sample-tokens=0",
    "--ncpu=2",
]


@pytest.fixture
def here(folder):
    """A directory with a model to start from and text."""
    write_model(folder / "start")
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_it_starts_where_the_directory_is(here, capsys):
    """The same losses, bit by bit, as from a file of the same weights with our names; also with little memory; and a resumed run goes on."""
    assert main([*BASE, "--run-dir=a", "--inner-tile=7", "--vocab-tile=50"]) == 0
    assert capsys.readouterr().out.startswith(("start: ", "tokenising"))
    assert main(["export", "a", "out"]) == 0
    tight = ["--ram=150KiB", "--disk=scratch:4MiB", "--recompute=none"]
    assert main([*BASE, "--run-dir=b", "--inner-tile=7", "--vocab-tile=50", *tight]) == 0
    assert losses(here / "a") == losses(here / "b")
    ours = GPT2(CONFIG, ModelTiling(), InlineRuntime(), seed=9)
    save_file({name: tensor.read() for name, tensor in ours.tensors().items()}, here / "ours.safetensors")
    (here / "c.json").write_text(json.dumps(CONFIG.to_dict()))
    rest = [each for each in BASE if "init-from" not in each]
    same = ["--config-path=c.json", "--init-from=ours.safetensors", "--tokenizer-path=start", "--inner-tile=7", "--vocab-tile=50"]
    assert main([*rest, *same, "--run-dir=c"]) == 0
    assert losses(here / "a") == losses(here / "c")
    assert main(["train", "--resume=a", "--steps=3", "--sample-tokens=0"]) == 0
    (here / "start").rename(here / "gone")
    assert main(["train", "--resume=a", "--steps=4", "--tokenizer-path=gone", "--sample-tokens=0"]) == 0
    assert len(losses(here / "a")) == 4
    assert main(["generate", "a", "--max-new-tokens=3"]) == 0


def test_bf16_weights_are_used_as_stored(here, capsys):
    """Export after no change at all gives the file's bits: --dtype bf16 with a learning rate of zero."""
    tensors = write_model(here / "narrow", dtype=ml_dtypes.bfloat16)
    argv = [each for each in BASE if "init-from" not in each and "--lr" not in each]
    assert main([*argv, "--init-from=narrow", "--dtype=bf16", "--lr=0", "--run-dir=run"]) == 0
    assert main(["export", "run", "out"]) == 0
    found = load_file(here / "out" / "model.safetensors")
    assert set(found) == set(tensors)
    for name, value in tensors.items():
        assert np.array_equal(found[name].view(np.uint16), value.view(np.uint16)), name


def test_export_says_what_it_wrote(here, capsys):
    """Shards, element type and tokenizer; a second one needs --force."""
    assert main([*BASE, "--run-dir=a"]) == 0
    capsys.readouterr()
    assert main(["export", "a", "out", "--dtype=fp16", "--shard-size=8KB"]) == 0
    out = capsys.readouterr().out
    index = json.loads((here / "out" / "model.safetensors.index.json").read_text())
    assert f"{len(set(index['weight_map'].values()))} files, to out" in out
    code, err = refuse(capsys, ["export", "a", "out"])
    assert (code, "replace it with --force" in err) == (2, True)
    code, err = refuse(capsys, ["export", "a", "/proc/out"])
    assert (code, "/proc/out cannot be written: /proc is not a writable directory" in err) == (2, True)
    assert main(["export", "a", "out", "--force"]) == 0
    assert (here / "out" / "model.safetensors").exists()
    assert not (here / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--init-from=nowhere"], 4, "nowhere does not exist"),
        (["--model=gpt2"], 2, "--init-from start brings its own config and weights, and --model gpt2 names others"),
        (["--init-from=text.txt"], 4, "text.txt is a file"),
        (["--init-from=weights.bin"], 4, "weights.bin is a torch pickle, which is never loaded here"),
        (["--init-from=empty"], 4, "config.json cannot be read"),
        (["--seq-len=17"], 2, "--seq-len must be at most"),
    ],
)
def test_refusals(here, capsys, argv, code, words):
    """One sentence, before anything is written."""
    (here / "empty").mkdir()
    (here / "weights.bin").write_bytes(b"PK\x03\x04")
    found, err = refuse(capsys, [*BASE, *argv])
    assert (found, words in err) == (code, True), err
    assert not (here / "runs").exists()


def change_tensor(name, change):
    """A change of one tensor of the file."""

    def edit(path: Path) -> None:
        tensors = {key: value.copy() for key, value in load_file(path / "model.safetensors").items()}
        value = change(tensors.pop(name))
        save_file({**tensors, **({} if value is None else {name: value})}, path / "model.safetensors")

    return edit


def change_config(**values):
    """A change of config.json."""

    def edit(path: Path) -> None:
        (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), **values}))

    return edit


def poke(value):
    """Put a value at the end of an array."""

    def change(array):
        array.reshape(-1)[-1] = value
        return array

    return change


NORM = "transformer.ln_f.weight"


def add_words(path: Path) -> None:
    """Give a word of the text an id that the model has no row for."""
    inner = load_tokenizer(path).inner
    inner.add_tokens([*(f"w{number}" for number in range(60)), "words"])
    inner.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (change_tensor(NORM, poke(np.nan)), 4, f"{NORM} in start/model.safetensors holds nan, as float32, and weights must be finite"),
        (
            change_tensor("transformer.h.1.attn.c_attn.weight", poke(np.inf)),
            4,
            "transformer.h.1.attn.c_attn.weight in start/model.safetensors holds inf",
        ),
        (change_tensor(NORM, lambda array: None), 4, f"start has no tensor {NORM} of shape (12,)"),
        (change_tensor(NORM, lambda array: array[:5].copy()), 4, "has shape (5,), config.json makes it (12,)"),
        (change_config(activation_function="mish"), 2, "activation_function in start/config.json must be one of"),
        (change_config(model_type="electra"), 2, "needs a mask token, and the tokenizer of the data has none"),
        (change_config(model_type="bort"), 2, 'model_type in start/config.json is "bort", which neither nntask nor transformers'),
        (change_config(vocab_size=200), 4, "wte.weight in start/model.safetensors has shape (300, 12), config.json makes it (200, 12)"),
        (lambda path: (path / "tokenizer.json").unlink(), 4, "--init-from start has no tokenizer.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), 4, "is not a tokenizer file"),
        (add_words, 4, "text.txt, line 1, has the token words with the id"),
    ],
)
def test_directories_that_cannot_be_used(here, capsys, edit, code, words):
    """Tensor, file, shapes and values are named; nothing but an empty run is left behind."""
    edit(here / "start")
    capsys.readouterr()
    found = main([*BASE, "--run-dir=run"])
    err = capsys.readouterr().err
    assert (found, words in err, err.count("\n")) == (code, True, 1), err
    assert not list(here.glob("run/checkpoints/*"))


def test_names_follow_the_directory(here):
    """An untied head, and the directory's name as that of the run."""
    tensors = write_model(here / "other", replace(CONFIG, tie_word_embeddings=False))
    assert main([*[each for each in BASE if "init-from" not in each and "--lr" not in each], "--init-from=other/.", "--lr=0"]) == 0
    (run,) = (here / "runs").iterdir()
    assert run.name.endswith("-other")
    found = load_file(run / "latest" / "model.safetensors")
    assert np.array_equal(found["lm_head"], tensors["lm_head.weight"])
    assert not np.array_equal(found["lm_head"], found["wte.weight"])


def test_token_ids_of_another_tokenizer_are_refused(here, capsys):
    """Weights know the ids of one tokenizer, and train.bin has its own beside it: nothing is trained unless they are one."""
    argv = [each for each in BASE if "dataset" not in each]
    assert main(["data", "prepare", "--dataset=text", "--dataset-path=text.txt", "--tokenizer-path=start", "--output=same"]) == 0
    assert main([*argv, "--dataset=train.bin", "--dataset-path=same", "--run-dir=run"]) == 0
    assert main(["data", "prepare", "--dataset=text", "--dataset-path=text.txt", "--vocab-size=270", "--output=other"]) == 0
    said = capsys.readouterr().out
    assert "to other/train.bin\n" in said
    assert said.endswith("use it with: nntask train --dataset train.bin --dataset-path other\n")
    code, err = refuse(capsys, [*argv, "--dataset=train.bin", "--dataset-path=other"])
    assert (code, "holds ids of other/tokenizer.json, and start gives words other ids" in err) == (2, True), err


def test_texts_begin_and_end_as_they_did(here, capsys):
    """A run from weights whose config names two ends, and its tokenizer a beginning: into the exported directory, through the token file."""
    inner = load_tokenizer(here / "start").inner
    inner.add_special_tokens(["<s>", "</s>", "<turn>"])
    bos, eos, turn = (inner.token_to_id(word) for word in ("<s>", "</s>", "<turn>"))
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    inner.save(str(here / "start" / "tokenizer.json"))
    change_config(bos_token_id=bos, eos_token_id=[eos, turn])(here / "start")
    assert main([*BASE, "--run-dir=run", "--sample-tokens=3"]) == 0
    assert main(["generate", "run", "--max-new-tokens=3"]) == 0
    assert main(["export", "run", "out"]) == 0
    config = json.loads((here / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (bos, [eos, turn])
    assert load_tokenizer(here / "out").special.eos == (eos, turn)
    assert load_tokenizer(here / "run" / "latest").begin_of_text == bos
