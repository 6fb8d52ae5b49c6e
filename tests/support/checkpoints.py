"""Checkpoints of one weight and one moment, small enough to save hundreds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nntask.checkpoints.store import save_checkpoint
from scheduler import InlineRuntime
from tiles import TileTensor

RUNTIME = InlineRuntime()


def tensor(shape: tuple[int, ...], tile: tuple[int, ...], dtype: object = np.float32, seed: int = 0) -> TileTensor:
    """A tensor of seeded normals."""
    made = TileTensor(RUNTIME, shape, tile, dtype)
    made.write(np.random.default_rng(seed).standard_normal(shape).astype(dtype))
    return made


def save_step(run: Path, step: int, keep: int = 3) -> Path:
    """Save a checkpoint of one weight and one moment."""
    state = {"step": step, "cursor": [0, step], "model": {}}
    return save_checkpoint(run, state, {"w": tensor((4, 3), (2, 2), seed=step)}, {"m": tensor((4, 3), (2, 2))}, keep=keep)
