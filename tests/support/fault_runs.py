"""A run on random tokens for tests of faults: its config, its data, and the flags that all such runs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wrappers.cli import main

from .commands import numbers

DROPOUTS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
CONFIG: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, **DROPOUTS}
FLAGS = "--config-path=config.json --dataset=train.bin --dataset-path=. --batch=4 --minibatch=2 --lr=1e-3 --ncpu=2 --sample-tokens=0"


def prepare(folder: Path) -> None:
    """Write the config and the tokens."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 5000).astype(np.uint16).tofile(folder / "train.bin")


def undisturbed(folder: Path, train: Sequence[str]) -> list[tuple[int, float, float, float]]:
    """Return every line of the run of a command in an empty directory, where nothing happens to it."""
    prepare(folder)
    assert main([*train, f"--config-path={folder}/config.json", f"--dataset-path={folder}", f"--run-dir={folder}/a"]) == 0
    return numbers(folder / "a")
