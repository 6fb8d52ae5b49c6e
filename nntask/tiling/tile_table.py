"""Users' tile tables: TOML files of tilings that ``--auto-tile measured`` found, each for exactly one shape of model and minibatch.

::

    [[tiling]]        # the fields of `Shape`, then those of `ModelTiling`
    n_embd = 768
    ...
    vocab_tile = 8384

The number of layers is not part of a shape, because tiles do not depend on it. The built-in table (`model_tiling`) cuts shapes without a row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..architecture.family_config import ModelConfig
from ..errors import DataError, StorageError
from ..io.atomic_write import write_atomically
from ..io.regular_file import read_text
from .model_tiling import ModelTiling

_ROWS: Final = "tiling"


class Shape(NamedTuple):
    """Key of a row: the shape of a model and a minibatch."""

    n_embd: int
    n_inner: int
    n_head: int
    n_kv_head: int
    vocab_size: int
    minibatch: int
    seq_len: int


def shape_of(config: ModelConfig, minibatch: int, seq_len: int) -> Shape:
    """Return the key of a model and a minibatch in a table."""
    return Shape(config.n_embd, config.inner_size, config.n_head, config.n_kv_head, config.vocab_size, minibatch, seq_len)


def read_table(path: str | Path) -> dict[Shape, ModelTiling]:
    """Return the rows of a file, the last of equal shapes.

    Raises:
        DataError: the file cannot be read or is not a tile table.
    """
    try:
        content = tomllib.loads(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"the tile table {path} cannot be read: {why}", "give an existing file, or make one with --auto-tile measured@FILE") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"the tile table {path} is not a TOML file: {error}", "correct it, or give another file") from None
    rows = content.pop(_ROWS, [])
    if content or not isinstance(rows, list):
        raise DataError(f"the tile table {path} must hold [[{_ROWS}]] rows and nothing else, got {', '.join(content) or _ROWS}", "give another file")
    return dict(_row(row, f"the tile table {path}, row {number}") for number, row in enumerate(rows, 1))


def _row(row: Any, source: str) -> tuple[Shape, ModelTiling]:
    """Check and return one row.

    Raises:
        DataError: a key is missing or unknown, or a size is not a whole number of at least 1.
    """
    sizes = [f.name for f in fields(ModelTiling)]
    wanted = [*Shape._fields, *sizes]
    if not isinstance(row, Mapping) or set(row) != set(wanted):
        keys = ", ".join(sorted(row)) if isinstance(row, Mapping) else repr(row)
        raise DataError(f"{source} must have the keys {', '.join(wanted)}, got {keys}", "correct or remove the row")
    for name in wanted:
        if type(row[name]) is not int or row[name] < 1:
            raise DataError(f"{source}: {name} must be a whole number of at least 1, got {row[name]!r}", "correct or remove the row")
    if row["minibatch"] % row["minibatch_tile"]:
        raise DataError(
            f"{source}: minibatch_tile must divide minibatch = {row['minibatch']}, got {row['minibatch_tile']}", "correct or drop the row"
        )
    return Shape(*(row[name] for name in Shape._fields)), ModelTiling(*(row[name] for name in sizes))


def add_row(path: str | Path, shape: Shape, tiling: ModelTiling) -> None:
    """Write a tiling to a file, in place of an earlier one of that shape; creates a missing file.

    Raises:
        DataError: the file exists and is not a tile table.
        StorageError: the file cannot be written.
    """
    path = Path(path)
    rows = read_table(path) if path.exists() else {}
    rows[shape] = tiling
    lines = ["# tilings found by nntask train --auto-tile measured@FILE; later runs read them with --auto-tile table@FILE"]
    for each, sizes in rows.items():
        lines += ["", f"[[{_ROWS}]]"] + [f"{name} = {size}" for name, size in {**each._asdict(), **asdict(sizes)}.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise StorageError(f"the tile table {path} cannot be written: {error.strerror or error}", "name another file") from error
