"""Export of a checkpoint's own tensors, under nntask's names, as one safetensors file: the weights or the optimizer state."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Final, Literal

import numpy as np

from ..checkpoints.store import MODEL, OPTIMIZER, STATE, Checkpoint
from ..errors import DataError, StorageError, UsageError
from ..io.atomic_write import written_aside
from ..io.safetensors_file import STORAGE, TensorFile
from .huggingface import Exported, as_stored, check_apart_from, check_new_file, new_file, pieces

_FILES: Final = {"weights": MODEL, "optimizer": OPTIMIZER}


def check_state_file(path: Path, *, force: bool, instead: str = "replace it with --force") -> None:
    """Check that a file may be written to `path`, without creating it; `force` and `instead` are those of `check_new_file`.

    Raises:
        UsageError: the path lies in a checkpoint, or `check_new_file` refuses it.
    """
    if (path.parent / STATE).exists():
        raise UsageError(f"{path} lies in a checkpoint, which nothing but training writes", "name a file elsewhere")
    check_new_file(path, "a safetensors file", _is_safetensors, force=force, instead=instead)


def _is_safetensors(path: Path) -> bool:
    try:
        TensorFile(path).close()
    except DataError:
        return False
    return True


def export_state(source: Checkpoint, path: Path, *, content: Literal["weights", "optimizer"], dtype: str, force: bool = False) -> Exported:
    """Write the weights or the optimizer state of a checkpoint to a file.

    Args:
        source: checkpoint to export; of one with adapters, the weights are those of the adapters.
        path: file to write.
        content: tensors to write.
        dtype: "fp32", "fp16", "bf16", or "auto" for the element type of each tensor in the checkpoint, which codes of 8 bits keep in any case.
        force: whether to replace an existing safetensors file.

    Raises:
        UsageError: `check_state_file` or `check_apart_from` refuses the file, or a value is too large for `dtype`.
        DataError: the checkpoint is broken.
        Diverged: a value is not finite.
        StorageError: the disk is full or failed; an existing file is kept.
    """
    check_apart_from(path, source)
    check_state_file(path, force=force)
    source.verify(_FILES[content])
    with TensorFile(source.path / _FILES[content]) as file:
        ranges = file.ranges()
    is_kept = {name: dtype == "auto" or each.dtype == np.uint8 for name, each in ranges.items()}  # codes of 8 bits are no numbers
    kinds = {name: each.dtype if is_kept[name] else STORAGE[dtype] for name, each in ranges.items()}
    try:
        with written_aside(path) as new:
            targets = new_file(new, {name: (each.shape, kinds[name]) for name, each in ranges.items()}, {})
            for name, each in ranges.items():
                for window, piece in pieces(each, kinds[name]):
                    targets[name][window].write(as_stored(name, piece, kinds[name]))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", "make room or name another file") from error
    sizes = {name: prod(each.shape) for name, each in ranges.items()}
    return Exported((path.name,), sum(size * kinds[name].itemsize for name, size in sizes.items()), sum(sizes.values()))
