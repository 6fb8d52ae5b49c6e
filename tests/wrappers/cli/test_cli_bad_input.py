"""Bad input: one plain sentence, the right exit code, no traceback, nothing overwritten, within two seconds of the processor."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.commands import refuse, rewrite_state
from support.deadline import DEADLINE

from nntask.training.preflight import file_system_of
from wrappers.cli import main

SMALL = {"vocab_size": 61, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


@pytest.fixture
def here(folder):
    """A directory with a small config and training tokens."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    (folder / "data").mkdir()
    (folder / "empty").mkdir()
    (folder / "data" / "train.bin").write_bytes((np.arange(2000) % 61).astype("<u2").tobytes())
    return folder


DATA = ["--dataset=train.bin", "--dataset-path=data"]
BASE = ["train", "--config-path=small.json", *DATA, "--batch=4", "--steps=2", "--lr=1e-3", "--warmup-steps=0", "--ncpu=1", "--sample-tokens=0"]
NODES = ["--dask=local:2", "--lanes=2", "--minibatch=2"]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--minibatch=3"], 2, "--minibatch must divide --batch = 4, got 3; the nearest legal value is 2"),
        (["--minibatch=2", "--minibatch-tile=3"], 2, "--minibatch-tile must divide --minibatch = 2, got 3"),
        (["--bach=3"], 2, "did you mean --batch"),
        (["--config-path=none.json"], 4, "none.json"),
        (["--seq-len=17"], 2, "--seq-len must be at most n_positions = 16, got 17; the nearest legal value is 16"),
        (["--seq-tile=17"], 2, "--seq-tile must be at most"),
        (["--ram=12XB"], 2, "12XB"),
        (["--batch=0"], 2, "--batch must be at least 1, got 0"),
        (["--steps=-1"], 2, "--steps must be at least 1, got -1"),
        (["--batch=500"], 4, "too short"),
        (["--optimizer=muon:2"], 2, "MOMENTUM in --optimizer must be at least 0 and below 1, got 2"),
        (["--optimizer=muon:"], 2, "--optimizer muon: lacks MOMENTUM at its end"),
        (["--optimizer=adamw8bit:0.9"], 2, "MOMENTUM in --optimizer 0.9 belongs to sgd and muon, not adamw8bit; drop it"),
        (["--optimizer=lion"], 2, "--optimizer must be one of adamw, adam, sgd, muon, adamw8bit, got 'lion'"),
        (["--resume="], 2, "--resume must name a run or a checkpoint, got an empty name"),
        (["--ngpu=-1"], 2, "drop --ngpu -1"),
        (["--dataset=WikiText-104"], 2, "--dataset WikiText-104 is not available"),
        (["--dataset=WikiText-103"], 4, "--dataset WikiText-103: data has no files of it"),
        (["--dataset=text", "--dataset-path="], 2, "--dataset text needs --dataset-path"),
        (["--dataset=stdlib"], 2, "--dataset-path data is not read by --dataset stdlib, the default; add --dataset train.bin, or drop"),
        (["--dataset=stdlib", "--dataset-path=small.json"], 2, "add --dataset text"),
        (["--tokenizer=gpt5"], 4, "--tokenizer gpt5: there is no tokenizer.json in"),
        (["--tokenizer=gpt5", "--tokenizer-path=data"], 4, "--tokenizer gpt5: there is no tokenizer.json in data"),
        (["--val-path=small.json", "--dataset-path=small.json", "--dataset=text", "--tokenizer=bytes"], 4, "plain bytes need"),
        (["--val-path=empty"], 4, "give an existing file with --val-path"),
        (["--val-path=empty", "--dataset=text", "--tokenizer=bytes"], 4, "--val-path empty holds no text"),
        (["--dataset-select=3"], 2, "--dataset-select 3 leaves fewer sequences than --batch 4"),
        (["--prompt=Once", "--sample-tokens=0"], 2, "--sample-tokens 0 asks for none; drop one of them"),
        (["--sim-gpu=2", "--gpu-memory=60"], 3, "B, more than the 60 B of sim:0, which would stay idle; it would fit with --gpu-memory "),
        (["--disk=tier:1000TiB"], 3, "--disk tier: SIZE is 1,099,511,627,776,000 B, and"),
        (["--trace-steps=1:3@t.json"], 2, "--trace-steps must lie within steps 1 to 2 of this run, got 1:3"),
        (["--dataset-path=nowhere"], 4, "--dataset-path nowhere does not exist"),
        (["--run-dir=/proc/none/run"], 2, "--run-dir /proc/none/run cannot be written"),
        (["--run-dir=small.json"], 2, "is a file"),
        (["--run-dir=data"], 2, "not empty"),
        (["--resume=data"], 4, "holds no checkpoint"),
        (["--resume"], 4, "found no checkpoint"),
        (["--resume=typo"], 4, "typo does not exist; give a run directory"),
        (["--init-from=none.safetensors"], 4, "none.safetensors"),
        (["--eval-every=1"], 2, "needs validation data"),
        (["--logger"], 2, "--logger is not offered"),
        (["--min-lr=1", "--schedule=cosine"], 2, "min_lr"),
        (["--config=none.toml"], 4, "none.toml"),
        (["--ram=1000TiB"], 3, "--ram 1000TiB cannot be reserved"),
        (["--ram=99999999TiB"], 2, "--ram must be at most"),
        (["--sim-gpu=1", "--gpu-memory=1000TiB"], 3, "--gpu-memory 1000TiB cannot be reserved"),
        (["--seed=99999999999999999999999"], 2, "--seed must be at most 9223372036854775807"),
        (["--init-from=gpt2"], 2, "--init-from gpt2 brings its own config and weights, and --config-path small.json names others; drop one"),
        (["--force"], 2, "--force belongs to nntask export; nothing else overwrites anything"),
        (["--disk=small.json"], 2, "--disk small.json is a file"),
        (["--disk=/proc"], 2, "--disk /proc cannot be written"),
        (["--disk=/proc/x:1GB"], 2, "--disk /proc/x cannot be written"),
        (["--train=lora:2", "--init-from=none.safetensors"], 4, "cannot read none.safetensors: "),
        (["--train=lora:2", "--init-from=data.safetensors"], 4, "cannot read data.safetensors: "),
        (["--train=lora:2", "--init-from=none.safetensors", *NODES], 4, "cannot read none.safetensors: "),
        (["--disk=none/there/tier:1GiB"], 2, "--disk none/there/tier cannot be created: there is no directory none/there; create it, or choose"),
        (["--disk=tier:12XB"], 2, "12XB"),
        (["--evict=mru"], 2, "--evict must be one of next-use, lru, fifo"),
        (["--order=random"], 2, "--order must be auto"),
        (["--order=forward"], 2, "it has submission, eager-update, layers, and auto; the others need a --minibatch below --batch"),
        (["--ncpu=10000"], 2, "--ncpu must be at most 1024"),
        (["--sim-gpu=1000"], 2, "--sim-gpu must be at most 64"),
        (["--gpu-memory=1GiB"], 2, "add --sim-gpu 1"),
    ],
)
def test_refusals(here, capsys, argv, code, words):
    """The message names what was given and what would be legal."""
    found, err = refuse(capsys, [*BASE, *argv])
    assert words in err
    assert found == code
    assert not (here / "runs").exists()
    assert (here / "small.json").read_text() == json.dumps({"model_type": "gpt2", **SMALL})


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--disk=small.json:100TB"], 2, "--disk small.json is a file"),
        (["--disk=none/a/b:100TB"], 2, "--disk none/a/b cannot be created"),
        (["--disk=/proc/x:100TB"], 2, "--disk /proc/x cannot be written"),
        (["--ram=10TB", "--minibatch=3"], 2, "--minibatch must divide"),
        (["--ram=10TB", "--dataset-path=nowhere"], 4, "--dataset-path nowhere does not exist"),
        (["--ram=10TB", "--init-from=none.safetensors"], 4, "cannot read none.safetensors: "),
        (["--ram=10TB", "--train=lora:2", "--init-from=none.safetensors"], 4, "cannot read none.safetensors: "),
        (["--ram=10TB", "--run-dir=/proc/x"], 2, "--run-dir /proc/x cannot be written"),
        (["--ram=10TB", "--trace-steps=all@data"], 2, "FILE in --trace-steps must not be a directory, got data"),
        (["--sim-gpu=1", "--gpu-memory=10TB", "--run-dir=/proc/x"], 2, "--run-dir /proc/x cannot be written"),
        (["--gpu-memory=10TB", "--run-dir=/proc/x"], 2, "--gpu-memory 10TB is about GPUs, and none is used"),
        (["--train=lora:2", "--init-from=none.safetensors", "--run-dir=/proc/x"], 2, "--run-dir /proc/x cannot be written"),
        (["--ngpu=-1", "--config-path=none.json"], 2, "--ngpu -1 needs a GPU"),
        (["--run-dir=/proc/x", "--disk=small.json", *NODES], 2, "--run-dir /proc/x cannot be written"),
    ],
)
def test_the_first_of_two_mistakes(here, capsys, argv, code, words):
    """Values come first, then devices, the model's config, places and files, and budgets that are not to be had at last."""
    found, err = refuse(capsys, [*BASE, *argv])
    assert err.startswith(f"nntask: {words}")
    assert found == code


@pytest.mark.parametrize(
    ("variables", "toml", "argv", "words"),
    [
        ({"NNTASK_RAM": "12XB"}, "", [], "NNTASK_RAM must be a size in B"),
        ({"NNTASK_RAM": "12XB"}, "", ["--ram=13XB"], "--ram must be a size in B"),
        ({"NNTASK_RAM": "12XB"}, 'ram = "13XB"', [], "NNTASK_RAM must be a size in B"),
        ({"NNTASK_NCPU": "1025"}, "", [], "NNTASK_NCPU must be at most 1024"),
        ({"NNTASK_ORDER": "turn:1/8"}, "", [], "NNTASK_ORDER turn:1/8: this step has no order"),
        ({}, "[resources]\nram = '12XB'", [], "ram in run.toml must be a size in B"),
        ({}, "minibatch = 3", [], "minibatch in run.toml must divide --batch = 4, got 3"),
        ({}, "seq-len = 17", [], "seq-len in run.toml must be at most n_positions"),
        ({}, "val-path = 'nowhere'", [], "val-path = nowhere in run.toml does not exist"),
    ],
)
def test_the_place_of_a_wrong_value_is_named(here, capsys, monkeypatch, variables, toml, argv, words):
    """The variable or the key that is wrong, not the flag they stand for."""
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    (here / "run.toml").write_text(toml)
    base = [flag for flag in BASE if not flag.startswith("--ncpu")]
    code, err = refuse(capsys, [*base, "--config=run.toml", *argv])
    assert code in (2, 4)
    assert err.startswith(f"nntask: {words}")


@pytest.mark.skipif(file_system_of(Path("/dev/shm")) != "tmpfs", reason="this machine has no file system in memory there")
def test_a_disk_that_is_memory(here, capsys):
    """One line says so, and the run goes on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        assert main([*BASE, f"--disk={place}/tier", "--ram=64MiB", "--run-dir=a"]) == 0
    assert capsys.readouterr().err == f"nntask: --disk {place}/tier is on tmpfs, which is RAM: its data takes memory in addition to --ram\n"


def test_own_results_are_overwritten_with_force(here, capsys):
    """A safetensors file, such as the result of an earlier export, and no other file and no link."""
    assert main([*BASE, "--run-dir=a"]) == 0
    for part in ("weights", "optimizer"):
        assert main(["export", "a", "w.safetensors", f"--format={part}", "--force"]) == 0
    (here / "x.safetensors").write_text("mine")
    (here / "to_w.safetensors").symlink_to("w.safetensors")
    (here / "to_nothing.safetensors").symlink_to("nothing")
    capsys.readouterr()
    exists, other = "exists; name another file, or replace it with --force", "is not a safetensors file"
    for name, force, words in (
        ("w", [], exists),
        ("to_nothing", [], exists),
        *((name, ["--force"], other) for name in ("x", "to_w", "to_nothing")),
    ):
        assert main(["export", "a", f"{name}.safetensors", "--format=weights", *force]) == 2
        assert words in capsys.readouterr().err
    assert (here / "x.safetensors").read_text() == "mine"


def test_no_export_writes_over_what_it_reads(here, capsys):
    """Neither over the checkpoint, nor over another one of the run, nor over the frozen weights of adapters, in any format and with --force."""
    assert main([*BASE, "--steps=2", "--save-every=1", "--run-dir=a"]) == 0
    assert main(["export", "a", "w.safetensors", "--format=weights"]) == 0
    assert main([*BASE, "--train=lora:2", "--init-from=w.safetensors", "--run-dir=b"]) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    step = "a/checkpoints/step-000002"
    cases = [
        *(f"a {place}/{part}.safetensors --format=weights" for place in (step, f"{step[:-1]}1", "a/latest") for part in ("model", "optimizer")),
        f"a {step}/model.safetensors --format=optimizer",
        *("b w.safetensors --format=weights", "b w.safetensors --format=optimizer", f"a {step}", f"b {here}", f"a {step}/x.gguf --format=gguf"),
    ]
    for case in cases:
        assert main(["export", *case.split(), "--force"]) == 2, case
        assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    assert main(["export", "b", "adapters.safetensors", "--format=weights"]) == 0
    assert re.match(r"wrote 384 adapter weights of b", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["train.bin", "train.bin.json", "tokenizer.json", "tokenizer.crc32"])
def test_a_broken_cache_is_made_again(here, capsys, name):
    """One line names the file; the run has the losses of the first, and the cache its bytes."""
    (here / "text.txt").write_text("some words, and some more\n" * 200)
    (here / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL, "vocab_size": 300}))
    argv = [*BASE, "--dataset=text", "--dataset-path=text.txt", "--tokenizer=bpe"]
    assert main([*argv, "--run-dir=a"]) == 0
    capsys.readouterr()
    (folder,) = (here / "cache" / "data").iterdir()
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / name).write_bytes(b"x")
    assert main([*argv, "--run-dir=b"]) == 0
    out = capsys.readouterr().out
    assert out.count("it is nntask's own cache and is rebuilt") == 1
    assert str(folder) in out
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    losses = [[json.loads(line)["loss"] for line in (here / run / "metrics.jsonl").read_text().splitlines()] for run in "ab"]
    assert losses[0] == losses[1]


def test_generate_with_a_tokenizer_of_its_own(here, capsys):
    """A run on bare token ids takes one with --tokenizer-path, if it fits; a run that knows its own refuses another."""
    (here / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL, "vocab_size": 300}))
    (here / "text.txt").write_text("some words, and some more\n" * 200)
    assert main([*BASE, "--run-dir=ids"]) == 0
    assert main([*BASE, "--run-dir=words", "--dataset=text", "--dataset-path=text.txt", "--tokenizer=bpe"]) == 0
    capsys.readouterr()
    code, err = refuse(capsys, ["generate", "ids"])
    assert (code, "name the one that made them with --tokenizer-path DIR" in err) == (4, True)
    code, err = refuse(capsys, ["generate", "words", "--ram=20KiB"])
    assert (code, "; use --ram " in err) == (3, True)
    code, err = refuse(capsys, ["generate", "words", "--tokenizer-path=words/latest"])
    assert (code, "drop it" in err) == (2, True)
    assert main(["generate", "ids", "--tokenizer-path=words/latest", "--max-new-tokens=2", "--prompt=some"]) == 0
    assert capsys.readouterr().out.startswith("some")


def test_unknown_model_and_command(here, capsys):
    """A preset or a command that is nearly right is suggested."""
    assert refuse(capsys, ["train", "--model=gpt2-big"])[0] == 2
    code, err = refuse(capsys, ["trian"])
    assert (code, "did you mean train?" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 4),
        ('{"vocab_size": 61, "n_pos', 4),
        ("[1, 2]", 2),
        (json.dumps({"model_type": "gpt2", **SMALL, "n_embd": "12"}), 2),
        (json.dumps({"model_type": "gpt2", **SMALL, "n_layer": 1.5}), 2),
        (json.dumps({"model_type": "gpt2", **SMALL, "n_head": 5}), 2),
        (json.dumps({"model_type": "gpt2", **SMALL, "n_layer": 0}), 2),
        (json.dumps({"model_type": "gpt2", **{k: v for k, v in SMALL.items() if k != "n_embd"}}), 2),
    ],
)
def test_configs_that_are_none(here, capsys, text, code):
    """Truncated files, wrong types, missing keys and widths that heads do not divide."""
    (here / "bad.json").write_text(text)
    found, err = refuse(capsys, ["train", "--config-path=bad.json", *DATA])
    assert found == code
    assert "bad.json" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\1\0\2", "not a multiple of 2"),
        (b"\1\0" * 40, "too short"),
        (np.array([1] * 100 + [61] + [1] * 500, "<u2").tobytes(), "token id 61 at position 100"),
    ],
)
def test_token_files_that_are_none(here, capsys, content, words):
    """Empty, odd-sized, too short and out of the vocabulary; the file stays as it is."""
    (here / "data" / "train.bin").write_bytes(content)
    code, err = refuse(capsys, BASE)
    assert code == 4
    assert words in err
    assert (here / "data" / "train.bin").read_bytes() == content


def test_weights_that_do_not_fit(here, capsys):
    """Missing and misshapen tensors name both shapes; corrupt files and torch pickles are refused."""
    from safetensors.numpy import load_file, save_file

    assert main([*BASE, "--steps=1", "--run-dir=first"]) == 0
    assert main(["export", "first", "w.safetensors", "--format=weights"]) == 0
    capsys.readouterr()
    weights = load_file(here / "w.safetensors")
    name = max(weights, key=lambda key: weights[key].size)
    cases = {
        "missing": ({k: v for k, v in weights.items() if k != name}, [name, str(weights[name].shape)]),
        "shape": ({**weights, name: np.zeros((3, 5), np.float32)}, [name, "(3, 5)", str(weights[name].shape)]),
    }
    for case, (tensors, words) in cases.items():
        save_file(tensors, here / f"{case}.safetensors")
        code, err = refuse(capsys, [*BASE, f"--init-from={case}.safetensors", "--run-dir=second"])
        assert code == 4
        assert all(word in err for word in words)
    for content, words in ((b"\0" * 30, "not a whole safetensors file"), (b"PK\x03\x04" + b"\0" * 30, "torch pickle")):
        (here / "bad.safetensors").write_bytes(content)
        code, err = refuse(capsys, [*BASE, "--init-from=bad.safetensors", "--run-dir=second"])
        assert code == 4
        assert words in err
    assert not (here / "second").exists()


def test_resuming_another_run_names_every_difference(here, capsys):
    """Model, tiling, data and optimizer are fixed; resources are free; a finished run says how to go on."""
    assert main([*BASE, "--run-dir=run"]) == 0
    capsys.readouterr()
    before = (here / "run" / "metrics.jsonl").read_text()
    (here / "other.json").write_text(json.dumps({"model_type": "gpt2", **SMALL, "n_layer": 2}))
    resume = ["train", "--resume=run", "--steps=4"]
    for argv, words in (
        (["--config-path=other.json"], ["n_layer (was 1, is 2)"]),
        (["--seq-tile=8", "--lanes=2"], ["--seq-tile (was", "--lanes (was 1, is 2)"]),
        (["--lr=1", "--batch=2", "--minibatch=2"], ["--lr (was 0.001, is 1.0)", "--batch (was 4, is 2)"]),
        (["--seed=3"], ["--seed (was 0, is 3)"]),
        (["--run-dir=elsewhere"], ["drop --run-dir"]),
        (["--steps=2"], ["--steps must be above the 2 steps"]),
    ):
        code, err = refuse(capsys, [*resume, *argv])
        assert code == 2
        assert all(word in err for word in words), err
    for argv in (["--config-path=other.json"], ["--seq-len=8"], ["--batch=2"], ["--lr=1"]):
        assert refuse(capsys, ["plan", "--resume=run", *argv]) == refuse(capsys, [*resume, *argv])
    assert (here / "run" / "metrics.jsonl").read_text() == before
    assert main([*resume, "--ncpu=2", "--sched=eager"]) == 0
    assert len((here / "run" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(step="abc"), "step in "),
        (lambda state: state.update(cursor=[1]), "cursor in "),
        (lambda state: state.update(settings=[]), "settings in "),
        (lambda state: state["settings"]["tiling"].update(batch="x"), "settings.tiling.batch in "),
        (lambda state: state["settings"]["model"].update(dtype=5), "settings.model.dtype in "),
        (lambda state: state["model"].update(n_embd="12"), "n_embd in model in "),
        (lambda state: state["model"].pop("n_layer"), "lacks n_layer"),
    ],
)
def test_checkpoints_whose_state_has_other_types(here, capsys, change, words):
    """File and key are named, by train and by generate alike."""
    (here / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL, "vocab_size": 257}))
    assert main([*BASE, "--run-dir=run", "--tokenizer=bytes"]) == 0
    capsys.readouterr()
    file = here / "run" / "checkpoints" / "step-000002" / "state.json"
    rewrite_state(file, change)
    for argv in (["train", "--resume=run", "--steps=4"], ["generate", "run"]):
        code, err = refuse(capsys, argv)
        assert code == 4
        assert words in err
        assert "state.json" in err
    assert len((here / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_weights_that_changed_on_the_disk(here, capsys):
    """One flipped bit: neither train nor generate goes on from it, and nothing is written."""
    (here / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL, "vocab_size": 257}))
    assert main([*BASE, "--run-dir=run", "--tokenizer=bytes"]) == 0
    config = (here / "run" / "config.toml").stat().st_mtime_ns
    for name, commands in (
        ("optimizer", (["train", "--resume=run", "--steps=4"],)),
        ("model", (["train", "--resume=run", "--steps=4"], ["generate", "run"])),
    ):
        file = here / "run" / "checkpoints" / "step-000002" / f"{name}.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
        capsys.readouterr()
        for argv in commands:
            code, err = refuse(capsys, argv)
            assert code == 4
            assert f"step-000002/{name}.safetensors is corrupt" in err
        file.write_bytes(content)
    assert (here / "run" / "config.toml").stat().st_mtime_ns == config
    assert main(["train", "--resume=run", "--steps=4"]) == 0


def test_data_that_changed_and_data_that_moved(here, capsys):
    """A run continues on equal data wherever they lie, and refuses others in the same place."""
    assert main([*BASE, "--run-dir=run"]) == 0
    capsys.readouterr()
    (here / "data").rename(here / "moved")
    code, err = refuse(capsys, ["train", "--resume=run", "--steps=4"])
    assert (code, "--dataset-path data does not exist" in err) == (4, True)
    assert main(["train", "--resume=run", "--steps=4", "--dataset-path=moved"]) == 0
    capsys.readouterr()
    path = here / "moved" / "train.bin"
    content = bytearray(path.read_bytes())
    content[1000] = (content[1000] + 1) % 61
    path.write_bytes(content)
    code, err = refuse(capsys, ["train", "--resume=run", "--steps=6"])
    assert (code, "was trained on other data" in err) == (4, True)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["generate", "typo"], 4, "typo does not exist; give a run directory, one of its checkpoints, a model directory"),
        (["perplexity", "typo"], 4, "typo does not exist; give a run directory, one of its checkpoints, a model directory"),
        (["generate", "stopped"], 4, "stopped holds a run that saved no checkpoint"),
        (["export", "stopped", "out"], 4, "stopped holds a run that saved no checkpoint"),
        (["train", "--run-dir=stopped"], 2, "--run-dir stopped holds a run that saved nothing; remove it, or give a new directory"),
        (["train", "--dataset=text", "--dataset-path=binary"], 4, "--dataset-path binary is not text in UTF-8: it holds NUL bytes"),
        (["export", "x"], 2, "nntask: export needs RUN DIR; see"),
        (["bench"], 2, "nntask: bench needs NAME; NAME is one of overhead, "),
        (["data", "prepare", "--output=/proc/x"], 2, "--output /proc/x cannot be written: /proc is not a writable directory"),
    ],
)
def test_what_other_commands_say(here, capsys, argv, code, words):
    """The message names what is wrong and what to do."""
    (here / "stopped").mkdir()
    (here / "stopped" / "config.toml").touch()
    (here / "stopped" / "metrics.jsonl").write_text("{}\n")
    (here / "binary").write_bytes(bytes(1000))
    found, err = refuse(capsys, argv)
    assert words in err
    assert found == code


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["generate"], 2),
        (["generate", "x", "--seed=9223372036854775808"], 2),
        (["generate", "x", "--ram=99999999TiB"], 2),
        (["generate", "x", "--disk=tier:12XB"], 2),
        (["generate", "x", "--disk=small.json"], 2),
        (["generate", "nowhere"], 4),
        (["generate", "x", "--temperature=-1"], 2),
        (["generate", "x", "--top-p=0"], 2),
        (["generate", "x", "--max-new-tokens=0"], 2),
        (["report", "nowhere"], 4),
        (["bench", "speed"], 2),
        (["plan", "--batch=3", "--minibatch=2"], 2),
        (["devices", "--jsn"], 2),
        (["export", "nowhere"], 2),
        (["export", "nowhere", "out"], 4),
        (["export", "nowhere", "out", "--shard-size=5XB"], 2),
        (["export", "nowhere", "out", "--dtype=fp8"], 2),
        (["data"], 2),
        (["data", "load"], 2),
        (["data", "prepare"], 2),
        (["data", "prepare", "--output=data"], 2),
        (["data", "prepare", "--output=out", "--dataset=train.bin", "--dataset-path=data"], 2),
        (["data", "prepare", "--output=out", "--dataset=WikiText-103"], 4),
        (["data", "prepare", "--output=out", "--dataset=text", "--dataset-path=empty"], 4),
    ],
)
def test_other_commands_refuse_alike(here, capsys, argv, code):
    """Every command has the same manners."""
    assert refuse(capsys, argv)[0] == code


def test_as_a_process(here):
    """The whole process, imports included, answers a mistake within two seconds of the processor and prints no traceback; --help is quick."""
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    for argv, code in ((["train", "--bach=3"], 2), (["train", "--model=tiny", "--ram=12XB"], 2), (["--help"], 0), (["train", "--help"], 0)):
        begin = os.times()
        done = subprocess.run([sys.executable, "-m", "nntask", *argv], capture_output=True, text=True, env=env, timeout=DEADLINE, check=False)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        end = os.times()
        assert end.children_user + end.children_system - begin.children_user - begin.children_system < 2
    assert "--minibatch" in done.stdout


def test_a_config_of_nntile_is_read_with_a_notice(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of GPT-2's keys without a model_type trains; with a key of another family it is refused."""
    (here / "small.json").write_text(json.dumps({**SMALL, "vocab_size": 257}))
    assert main(["plan", "--config-path=small.json", "--batch=2", "--json"]) == 0
    notice = 'nntask: small.json lacks model_type; its keys are those of GPT-2, and it is read as one (add "model_type": "gpt2")\n'
    assert capsys.readouterr().err == notice
    (here / "small.json").write_text(json.dumps({**SMALL, "rotary_dim": 4}))
    assert main(["plan", "--config-path=small.json", "--batch=2", "--json"]) == 2
    err = capsys.readouterr().err
    assert "small.json lacks model_type, and a GPT-2, the default, has no key rotary_dim; add the model_type of its family" in err
    assert err.count("\n") == 1
