"""``nntask export``: a run or a checkpoint as a directory that transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .help import parse

if TYPE_CHECKING:
    from nntask.checkpoints import Checkpoint
    from nntask.data import Tokenizer


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Write a model as transformers' from_pretrained reads it. RUN is a run directory or one of its checkpoints, DIR a new directory."""

    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """element type of the weights; auto: the one they are stored in"""
    shard_size: str = "5GB"
    """most bytes of weights in one file, e.g. 500MB"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a run that was trained on token ids without one"""
    force: bool = False
    """replace DIR if it is a model directory"""


def run(argv: Sequence[str]) -> int:
    """Write the directory and say what is in it."""
    settings, words = parse(ExportSettings, argv, "nntask export", words=("RUN", "DIR"))
    from nntask.checkpoints import find_checkpoint
    from nntask.hf.export import export
    from nntask.sizes import format_size, parse_size

    shard_nbytes = parse_size(settings.shard_size, "--shard-size")
    checkpoint = find_checkpoint(words[0])
    tokenizer = _tokenizer(checkpoint, settings.tokenizer_path)
    target = Path(words[1])
    done = export(checkpoint, target, dtype=settings.dtype, shard_nbytes=shard_nbytes, tokenizer=tokenizer, force=settings.force)
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    print(f"wrote {done.num_weights / 1e6:.1f} M weights of {checkpoint.path}, {format_size(done.nbytes)} in {files}, to {target}")
    if tokenizer is None:
        print("the run was trained on token ids without a tokenizer, so there is none; --tokenizer-path DIR adds it")
    return 0


def _tokenizer(checkpoint: Checkpoint, path: str) -> Tokenizer | None:
    from nntask.trainer.source import ModelSource

    if checkpoint.state.get("tokenizer") is None and not path:
        return None
    return ModelSource.open(checkpoint.path).tokenizer(path)
