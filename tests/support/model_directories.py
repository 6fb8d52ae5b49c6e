"""Model directories as transformers writes them, small and from a seed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from nntask.checkpoints.store import find_checkpoint, save_checkpoint
from nntask.config.settings import TrainSettings
from nntask.data.tokenizer import train_bpe
from nntask.hf.model_directory import ModelDirectory
from nntask.models.gpt2 import GPT2, NAMES, GPT2Config
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime

CONFIG = GPT2Config(vocab_size=300, n_positions=16, n_embd=12, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

TEXT = "some words, and some more\n" * 200


def write_model(path: Path, config: GPT2Config = CONFIG, dtype=np.float32) -> dict:
    """A directory as transformers writes it; returns its tensors."""
    path.mkdir()
    ours = {name: tensor.read() for name, tensor in GPT2(config, ModelTiling(), InlineRuntime(), seed=9).tensors().items()}
    tensors = {name: np.ascontiguousarray(value.astype(dtype)) for name, value in NAMES.to_hf(ours, config).items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config.to_dict(), "transformers_version": "5.0.0"}))
    train_bpe([TEXT], 290).save(path)
    return tensors


def losses(run: Path) -> list[float]:
    """Losses of a run's steps."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


CUTS = [ModelTiling(), ModelTiling(2, 5, 7, 11, 2, 13)]


def weights(path: Path, tiling=CUTS[0], runtime=None, dtype=np.float32) -> dict:
    """All weights of a directory, read through sources."""
    directory = ModelDirectory.open(path)
    model = GPT2(directory.config, tiling, runtime or InlineRuntime(), dtype=dtype, seed=None)
    directory.attach(model.tensors())
    return {name: tensor.read() for name, tensor in model.tensors().items()}


HUGE = 1 << 40


def saved(run, model, tokenizer=None):
    """A checkpoint of a model."""
    state = {"step": 1, "cursor": [0, 0], "model": model.config.to_dict(), "settings": asdict(TrainSettings())}
    save_checkpoint(run, {**state, "tokenizer": tokenizer and tokenizer.name}, model.tensors(), {}, tokenizer=tokenizer)
    return find_checkpoint(run)
