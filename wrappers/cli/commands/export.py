"""``nntask export``: a run or a checkpoint as a model directory for transformers or a GGUF file, or its adapters as a directory for PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ..options.help import parse

if TYPE_CHECKING:
    from nntask.checkpoints import Checkpoint
    from nntask.data import Tokenizer

LARGEST_SHARD: Final = "5GB"
SUFFIX: Final = ".gguf"


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Write a model as transformers' from_pretrained or llama.cpp reads it, or the adapters of a run that trained some as PEFT's does. RUN is a run
    directory or one of its checkpoints, DIR a new directory, or with --format gguf a new file whose name ends with .gguf."""

    format: Literal["hf", "gguf"] = "hf"
    """hf: a directory as transformers writes it; gguf: one file for llama.cpp and its like, see also nntask quantize"""
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """element type of the weights; auto: the one they are stored in"""
    merge: bool = False
    """of a run with adapters, write the whole model, what they add merged into it"""
    shard_size: str = ""
    """most bytes of weights in one file, e.g. 500MB (default 5GB)"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a run that was trained on token ids without one"""
    force: bool = False
    """replace DIR if it is a model directory"""


def run(argv: Sequence[str]) -> int:
    """Write the directory and print its contents; returns 0."""
    settings, words = parse(ExportSettings, argv, "nntask export", words=("RUN", "DIR"))
    from nntask import UsageError
    from nntask.checkpoints import find_checkpoint
    from nntask.config import format_size, image_shape, parse_size
    from nntask.export import export, export_adapters

    target = Path(words[1])
    if settings.format == "hf" and target.suffix == SUFFIX:
        raise UsageError(f"{target} is the name of a GGUF file, and --format hf writes a directory; add --format gguf, or name a directory")
    if settings.format == "gguf" and target.suffix != SUFFIX:
        raise UsageError(f"--format gguf writes a file whose name ends with {SUFFIX}, got {target}; name it {target}{SUFFIX}, or use --format hf")
    shard_nbytes = parse_size(settings.shard_size or LARGEST_SHARD, "--shard-size")
    checkpoint = find_checkpoint(words[0])
    has_adapters = checkpoint.state.get("base") is not None
    if settings.merge and not has_adapters:
        raise UsageError(f"--merge is about adapters, and {checkpoint.path} holds a whole model; drop it")
    if settings.shard_size and has_adapters and not settings.merge:
        raise UsageError(f"--shard-size {settings.shard_size} is about whole models, and adapters are one file; drop it, or add --merge")
    tokenizer = _tokenizer(checkpoint, settings.tokenizer_path)
    if settings.format == "gguf":
        return _gguf(settings, checkpoint, tokenizer, target)
    if has_adapters and not settings.merge:
        done = export_adapters(checkpoint, target, dtype=settings.dtype, tokenizer=tokenizer, force=settings.force)
    else:
        done = export(checkpoint, target, dtype=settings.dtype, shard_nbytes=shard_nbytes, tokenizer=tokenizer, force=settings.force)
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    what = "adapter weights" if has_adapters and not settings.merge else "weights"
    print(f"wrote {done.num_weights / 1e6:.1f} M {what} of {checkpoint.path}, {format_size(done.nbytes)} in {files}, to {target}")
    if tokenizer is None and image_shape(checkpoint.config) is None:
        print("the run was trained on token ids without a tokenizer, so there is none; --tokenizer-path DIR adds it")
    return 0


def _gguf(settings: ExportSettings, checkpoint: Checkpoint, tokenizer: Tokenizer | None, target: Path) -> int:
    """Write a GGUF file and print its size; returns 0."""
    from nntask import UsageError
    from nntask.config import format_size
    from nntask.export import Conversion, Convertible, write_gguf

    if settings.shard_size:
        raise UsageError(f"--shard-size {settings.shard_size} is about directories, and a GGUF file is one; drop it")
    if checkpoint.state.get("base") is not None and not settings.merge:
        raise UsageError(f"{checkpoint.path} holds adapters, and a GGUF file a whole model; add --merge")
    model = Convertible.of(checkpoint.path, checkpoint.config, checkpoint, tokenizer)
    kind = "" if settings.dtype == "auto" else settings.dtype.replace("fp", "f")
    done = write_gguf(model, target, Conversion(kind), force=settings.force)
    print(f"wrote {done.num_weights / 1e6:.1f} M weights of {checkpoint.path}, {format_size(done.nbytes)}, to {target}")
    for note in done.notes:
        print(f"note: {note}")
    return 0


def _tokenizer(checkpoint: Checkpoint, path: str) -> Tokenizer | None:
    from nntask.inference import ModelSource

    if checkpoint.state.get("tokenizer") is None and not path:
        return None
    return ModelSource.open(checkpoint.path).tokenizer(path)
