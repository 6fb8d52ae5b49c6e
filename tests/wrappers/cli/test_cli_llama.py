"""LLaMA through the commands: train, kill and resume, generate, plan, report; and what is refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.commands import KILL, numbers, same_state, start
from support.deadline import DEADLINE

from wrappers.cli import main

SMALL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --head-tile=4 --dropout=0.1 --lr=1e-3"
TRAIN = ["train", *FLAGS.split(), "--ncpu=2", "--sample-tokens=0"]


@pytest.fixture
def here(folder: Path, text: Path) -> Path:
    """A directory of its own with a small config and some text."""
    (folder / "small.json").write_text(json.dumps(SMALL))
    return folder


def refuse(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, str]:
    """Exit code and message of a command that must fail with one sentence."""
    capsys.readouterr()
    code = main(argv)
    err = capsys.readouterr().err
    assert code
    assert err.count("\n") == 1, err
    return code, err


@pytest.mark.long
def test_a_kill_while_saving_costs_nothing(here: Path) -> None:
    """Ten steps equal five, kill -9 during the next checkpoint, and five more after a resume within a fifth of the memory."""
    flags = ["--steps=10", "--save-every=5"]
    assert main([*TRAIN, *flags, "--run-dir=a"]) == 0
    process = start(*TRAIN, *flags, "--run-dir=b", script=KILL)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGKILL
    assert main(["train", "--resume=b", "--ncpu=1", "--ram=400KiB", "--disk=tier"]) == 0
    assert same_state(here / "a" / "latest", here / "b" / "latest")
    assert numbers(here / "a") == numbers(here / "b")
    assert len(numbers(here / "b")) == 10
    names = set(load_file(here / "a" / "latest" / "model.safetensors"))
    assert {"embed_tokens.weight", "layers.1.self_attn.k_proj.weight", "norm.weight", "lm_head"} <= names


def test_a_run_is_sampled_and_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Validation and a sample; generate reads the run, whatever the memory; so does report."""
    extra = ["--steps=3", "--run-dir=a", "--eval-every=3", "--sample-tokens=5", "--dtype=bf16", "--recompute=block"]
    assert main([*TRAIN, *extra]) == 0
    out = capsys.readouterr().out
    for line in ("small: 0.0 M parameters, 2 layers, width 12; 4 x 16 tokens a step", "validation loss ", "--- sample"):
        assert line in out
    argv = ["generate", "a", "--max-new-tokens=8", "--prompt=line", "--seed=3"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("line")
    assert main([*argv, "--ram=96KiB", "--disk=tier:1GiB", "--ncpu=1"]) == 0
    assert capsys.readouterr().out == text
    assert main(["report", "a"]) == 0
    assert "Bokeh" in (here / "a" / "report.html").read_text()


def test_the_preset_trains_and_is_planned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """llama-tiny has the defaults of tiny; the plan counts its tasks as the run does."""
    flags = ["--model=llama-tiny", "--seq-len=64", "--batch=2", "--dataset=text", "--dataset-path=text", "--tokenizer=bytes", "--ncpu=2"]
    assert main(["plan", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["feasible"]
    assert plan["parameters"] == 5_048_576
    assert main(["train", *flags, "--steps=2", "--sample-tokens=0", "--run-dir=a"]) == 0
    out = capsys.readouterr().out
    assert "llama-tiny: 5.0 M parameters, 4 layers, width 256; 2 x 64 tokens a step" in out
    assert f"{plan['tasks_per_step']} tasks a step" in out
    assert {line[3] for line in numbers(here / "a")} == {1e-4, 2e-4}  # warm-up to 1e-3


def test_a_billion_parameters_are_planned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """llama-1b on an imaginary device: 4096 tokens unless told otherwise, and tiles that hold whole groups of four heads."""
    assert main(["plan", "--model=llama-1b", "--devices=1x80GiB@100TF", "--ram=100GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 1_235_814_400
    assert plan["tiles"]["seq_tile"] == 4096
    assert plan["tiles"]["head_tile"] % 4 == 0
    assert plan["persistent_bytes"]["ram"] >= 3 * 4 * plan["parameters"]


@pytest.mark.long
def test_tiles_are_found_by_trial(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search tries whole groups of heads only; the table that it writes is read for this shape again."""
    base = [flag for flag in TRAIN if not flag.startswith("--head-tile")]
    assert main([*base, "--steps=1", "--run-dir=a", "--auto-tile=measured@tiles.toml"]) == 0
    assert "n_kv_head = 3" in (here / "tiles.toml").read_text()
    assert main([*base, "--steps=1", "--run-dir=b", "--auto-tile=table@tiles.toml"]) == 0
    assert numbers(here / "a") == numbers(here / "b")


@pytest.mark.parametrize(
    ("change", "argv", "code", "words"),
    [
        (
            {},
            ["--head-tile=3"],
            2,
            "head_tile must be a multiple of 2, because 2 heads of queries share each of the 3 heads of keys and values, got 3",
        ),
        ({}, ["--seq-len=17"], 2, "--seq-len must be at most max_position_embeddings = 16, got 17"),
        ({"num_key_value_heads": 4}, [], 2, "num_attention_heads in small.json must be divisible by num_key_value_heads"),
        ({"hidden_act": "gelu"}, [], 2, "hidden_act in small.json must be one of silu, swish"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, [], 2, "rope_type in rope_scaling in small.json must be one of default, linear"),
        ({"model_type": "mamba"}, [], 2, "model_type in small.json must be one of gpt2, llama"),
        ({"hidden_size": None}, [], 2, "hidden_size in small.json must be a whole number"),
    ],
)
def test_what_is_refused(here: Path, capsys: pytest.CaptureFixture[str], change: dict, argv: list[str], code: int, words: str) -> None:
    """One sentence with the rule and the value, before anything is written."""
    (here / "small.json").write_text(json.dumps({**SMALL, **change}))
    base = [flag for flag in TRAIN if not flag.startswith("--head-tile") or not argv]
    found, err = refuse(capsys, [*base, *argv, "--run-dir=a"])
    assert (found, words in err) == (code, True), err
    assert not (here / "a").exists()


def test_a_checkpoint_of_another_family_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of a LLaMA are none of a GPT-2, and a run continues as the family it began."""
    assert main([*TRAIN, "--steps=2", "--run-dir=a"]) == 0
    assert main(["export", "a", "w.safetensors", "--format=weights"]) == 0
    gpt2 = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
    (here / "small.json").write_text(json.dumps(gpt2))
    base = [flag for flag in TRAIN if not flag.startswith("--head-tile")]
    code, err = refuse(capsys, [*base, "--steps=2", "--run-dir=b", "--init-from=w.safetensors"])
    assert code == 4
    assert "w.safetensors" in err
    code, err = refuse(capsys, ["train", "--resume=a", "--steps=4", "--config-path=small.json"])
    assert code == 2
    assert "model_type (was llama, is gpt2)" in err
