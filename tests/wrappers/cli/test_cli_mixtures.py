"""Mixtures of experts with wrong configs and files: one sentence and its exit code, by the command that trains and by the one that generates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.language_directories import GPT, tokenizer
from support.transformers_oracle import CONFIGS, hf_model

from wrappers.cli import main

Arrays = dict[str, np.ndarray]
TRAIN = [
    "train",
    "--init-from=start",
    "--dataset=text",
    "--dataset-path=text.txt",
    "--steps=2",
    "--seq-len=8",
    "--batch=2",
    "--ncpu=1",
    "--run-dir=run",
]
GENERATE = ["generate", "start", "--prompt=number", "--max-new-tokens=2", "--ncpu=1"]
ROUTER, MATRIX = "model.layers.2.mlp.gate.weight", "model.layers.0.mlp.experts.3.up_proj.weight"


def as_is(weights: Arrays) -> None:
    """Change nothing."""


def without(name: str) -> Callable[[Arrays], None]:
    """Leave out a tensor."""
    return lambda weights: weights.__delitem__(name)


def cut(name: str) -> Callable[[Arrays], None]:
    """Leave out the last row of a tensor."""
    return lambda weights: weights.update({name: np.ascontiguousarray(weights[name][:-1])})


def broken(weights: Arrays) -> None:
    """Put a NaN into a router."""
    weights[ROUTER][1, 2] = np.nan


CASES: dict[str, tuple[dict[str, Any], Callable[[Arrays], None], int, str]] = {
    "top k above experts": (
        {"num_experts_per_tok": 10},
        as_is,
        2,
        "num_experts_per_tok in start/config.json must be at most num_local_experts = 9, got 10",
    ),
    "top k of 0": ({"num_experts_per_tok": 0}, as_is, 2, "num_experts_per_tok in start/config.json must be at least 1, got 0"),
    "experts of width 0": ({"moe_intermediate_size": 0}, as_is, 2, "moe_intermediate_size in start/config.json must be at least 1, got 0"),
    "no experts": ({"num_local_experts": 0, "num_experts": 0}, as_is, 2, "must be at least 1, got 0"),
    "two counts of experts": ({"num_experts": 8}, as_is, 2, "start/config.json has num_local_experts twice"),
    "more experts than files": ({"num_local_experts": 11, "num_experts": 11}, as_is, 4, "has shape (9, 30), config.json makes it (11, 30)"),
    "fewer experts than files": ({"num_local_experts": 7, "num_experts": 7}, as_is, 4, "has shape (9, 30), config.json makes it (7, 30)"),
    "another width than files": ({"moe_intermediate_size": 18}, as_is, 4, "has shape (30, 19), config.json makes it (30, 18)"),
    "a block without experts in files": ({"mlp_only_layers": []}, as_is, 4, "start has no tensor model.layers.1.mlp.gate.weight"),
    "a block with experts in files": ({"mlp_only_layers": [0, 1]}, as_is, 4, "start has no tensor model.layers.0.mlp.gate_proj.weight"),
    "no router": ({}, without(ROUTER), 4, f"start has no tensor {ROUTER}"),
    "a matrix of an expert": ({}, without(MATRIX), 4, f"start has no tensor {MATRIX}"),
    "a router of fewer experts": ({}, cut(ROUTER), 4, ROUTER),
    "NaN in a router": ({}, broken, 4, f"{ROUTER} in start/model.safetensors holds nan"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a mixture."""
    path = tmp_path_factory.mktemp("mixture")
    hf_model(replace(CONFIGS["qwen3_moe"], vocab_size=300)).save_pretrained(path)
    tokenizer(GPT).save_pretrained(path)
    return path


@pytest.mark.parametrize("command", [TRAIN, GENERATE], ids=["train", "generate"])
@pytest.mark.parametrize("case", CASES)
def test_wrong_mixtures_are_refused(case: str, command: list[str], whole: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a step or a token."""
    changes, edit, code, words = CASES[case]
    shutil.copytree(whole, folder / "start")
    (folder / "text.txt").write_text("number 1 of 2 things " * 40)
    config = json.loads((folder / "start/config.json").read_text())
    (folder / "start/config.json").write_text(json.dumps({**config, **changes}))
    weights = load_file(folder / "start/model.safetensors")
    edit(weights)
    save_file(weights, folder / "start/model.safetensors", {"format": "pt"})
    assert main(command) == code
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("nntask: ")
    assert words in shown
    assert "; " in shown
    assert "\n" not in shown
