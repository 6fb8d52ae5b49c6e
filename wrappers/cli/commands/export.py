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
SAFETENSORS: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Write a trained model for other programs: a Hugging Face directory, adapters for PEFT, or a GGUF file. RUN is a run directory or one of its
    checkpoints, DIR a new directory, or a new file with --format gguf (name.gguf), weights and optimizer (name.safetensors)."""

    format: Literal["hf", "gguf", "weights", "optimizer"] = "hf"
    """hf (directory), gguf (file for llama.cpp), or weights and optimizer: a safetensors file with nntask's names of weights or optimizer state"""
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """element type of the tensors; auto is the one in which they are stored"""
    merge: bool = False
    """write the whole model of a run with adapters, with the adapters merged into its weights"""
    shard_size: str = ""
    """largest number of bytes of weights in one file, e.g. 500MB (default: 5GB)"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a run that was trained on token ids without a tokenizer"""
    force: bool = False
    """replace an existing model directory or file"""


def run(argv: Sequence[str]) -> int:
    """Write the directory or file and print its contents; returns 0."""
    settings, words = parse(ExportSettings, argv, "nntask export", words=("RUN", "DIR"))
    from nntask.checkpoints import find_checkpoint
    from nntask.io import parse_size

    target = Path(words[1])
    _check_name(settings, target)
    shard_nbytes = parse_size(settings.shard_size or LARGEST_SHARD, "--shard-size")
    checkpoint = find_checkpoint(words[0])
    if settings.format in ("weights", "optimizer"):
        return _state(settings, checkpoint, target)
    _check_adapters(settings, checkpoint)
    tokenizer = _tokenizer(checkpoint, settings.tokenizer_path)
    if settings.format == "gguf":
        return _gguf(settings, checkpoint, tokenizer, target)
    return _directory(settings, checkpoint, tokenizer, target, shard_nbytes)


def _check_name(settings: ExportSettings, target: Path) -> None:
    """Check that the name of the target has the suffix of its format.

    Raises:
        UsageError: it has another one.
    """
    from nntask import UsageError

    if settings.format == "hf" and target.suffix == SUFFIX:
        raise UsageError(f"{target} is the name of a GGUF file, and --format hf writes a directory", "add --format gguf, or name a directory")
    suffix = {"hf": target.suffix, "gguf": SUFFIX}.get(settings.format, SAFETENSORS)
    if target.suffix != suffix:
        other = ", or use --format hf" if settings.format == "gguf" else ""
        raise UsageError(
            f"writes a file whose name ends with {suffix}, got {target}", f"name it {target}{suffix}{other}", flag="--format", value=settings.format
        )


def _check_adapters(settings: ExportSettings, checkpoint: Checkpoint) -> None:
    """Check the flags that depend on whether the checkpoint has adapters.

    Raises:
        UsageError: one does not apply.
    """
    from nntask import UsageError

    has_adapters = checkpoint.state.get("base") is not None
    if settings.merge and not has_adapters:
        raise UsageError(f"is about adapters, and {checkpoint.path} holds a whole model", "drop it", flag="--merge")
    if settings.shard_size and has_adapters and not settings.merge:
        raise UsageError(
            "is about whole models, and adapters are one file", "drop it, or add --merge", flag="--shard-size", value=settings.shard_size
        )


def _state(settings: ExportSettings, checkpoint: Checkpoint, target: Path) -> int:
    """Write the checkpoint's weights or optimizer state to a file and print its size; returns 0."""
    from nntask import UsageError
    from nntask.export import export_state
    from nntask.io import format_count, format_size

    assert settings.format in ("weights", "optimizer")
    for flag, value, asked in (("--merge", None, settings.merge), ("--shard-size", settings.shard_size, settings.shard_size)):
        if asked:
            raise UsageError(f"is for a model directory, got --format {settings.format}", "drop it", flag=flag, value=value)
    done = export_state(checkpoint, target, content=settings.format, dtype=settings.dtype, force=settings.force)
    weights = "weights" if checkpoint.state.get("base") is None else "adapter weights"
    what = weights if settings.format == "weights" else "numbers of optimizer state"
    print(f"wrote {format_count(done.num_weights)} {what} of {checkpoint.path}, {format_size(done.nbytes)}, to {target}")
    return 0


def _directory(settings: ExportSettings, checkpoint: Checkpoint, tokenizer: Tokenizer | None, target: Path, shard_nbytes: int) -> int:
    """Write a model directory, or one with adapters, and print its contents; returns 0."""
    from nntask.config import image_shape
    from nntask.export import export, export_adapters
    from nntask.io import format_count, format_size

    as_adapters = checkpoint.state.get("base") is not None and not settings.merge
    if as_adapters:
        done = export_adapters(checkpoint, target, dtype=settings.dtype, tokenizer=tokenizer, force=settings.force)
    else:
        done = export(checkpoint, target, dtype=settings.dtype, shard_nbytes=shard_nbytes, tokenizer=tokenizer, force=settings.force)
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    what = "adapter weights" if as_adapters else "weights"
    print(f"wrote {format_count(done.num_weights)} {what} of {checkpoint.path}, {format_size(done.nbytes)} in {files}, to {target}")
    if tokenizer is None and image_shape(checkpoint.config) is None:
        print("the run was trained on token ids without a tokenizer, so there is none; --tokenizer-path DIR adds it")
    return 0


def _gguf(settings: ExportSettings, checkpoint: Checkpoint, tokenizer: Tokenizer | None, target: Path) -> int:
    """Write a GGUF file and print its size; returns 0."""
    from nntask import UsageError
    from nntask.export import Conversion, Convertible, write_gguf
    from nntask.io import format_count, format_size

    if settings.shard_size:
        raise UsageError("is about directories, and a GGUF file is one", "drop it", flag="--shard-size", value=settings.shard_size)
    if checkpoint.state.get("base") is not None and not settings.merge:
        raise UsageError(f"{checkpoint.path} holds adapters, and a GGUF file a whole model", "add --merge")
    model = Convertible.of(checkpoint.path, checkpoint.config, checkpoint, tokenizer)
    kind = "" if settings.dtype == "auto" else settings.dtype.replace("fp", "f")
    done = write_gguf(model, target, Conversion(kind), force=settings.force)
    print(f"wrote {format_count(done.num_weights)} weights of {checkpoint.path}, {format_size(done.nbytes)}, to {target}")
    for note in done.notes:
        print(f"note: {note}")
    return 0


def _tokenizer(checkpoint: Checkpoint, path: str) -> Tokenizer | None:
    from nntask.inference import ModelSource

    if checkpoint.state.get("tokenizer") is None and not path:
        return None
    return ModelSource.open(checkpoint.path).tokenizer(path)
