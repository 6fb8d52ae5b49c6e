"""Files of a path that a user names: one file, the files of a pattern, or those of a directory by its layout (`layout`)."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import DataError
from ..io.regular_file import read_bytes
from .findings import Finding
from .layout import is_document, splits_of
from .splits import Listing, Splits, named

_SKIPPED: Final = frozenset({"__pycache__", "__MACOSX"})
_MOST_DOCUMENT_NBYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a path.

    Args:
        root: the directory that names are relative to.
        train: files for training, or all that were named.
        validation: files of a validation split.
        sentence: which files were taken for what; "" for a single file.
        findings: files that are left out.
    """

    root: Path
    train: tuple[Path, ...]
    validation: tuple[Path, ...] = ()
    sentence: str = ""
    findings: tuple[Finding, ...] = ()

    def name_of(self, file: Path) -> str:
        """The name of a file below the root."""
        return file.relative_to(self.root).as_posix()


def is_named(path: str) -> bool:
    """Whether a path is there, or a pattern names a file."""
    return Path(path).exists() or bool(_files_of_pattern(path))


def data_files(path: str, flag: str, is_data: Callable[[str], bool], has_rows: Callable[[str], bool]) -> DataFiles:
    """Return the files that a path names, by split.

    Args:
        path: a file, a directory, or a pattern of files such as ``DIR/train_*.jsonl``, whose files all train.
        flag: the command-line flag that named it, for messages.
        is_data, has_rows: see `splits_of`.

    Raises:
        DataError: nothing is there, a file is a link to nothing, or the layout leaves open what trains.
    """
    root = Path(path)
    if not root.exists():
        files = _files_of_pattern(path)
        if not files:
            raise DataError(f"{flag} {path} does not exist; give an existing file or directory, or a pattern that names a file")
        return DataFiles(Path(os.path.commonpath([file.parent for file in files])), files, (), f"{flag} {path}: training {named([*map(str, files)])}")
    if not root.is_dir():
        return DataFiles(root.parent, (root,))
    where = f"{flag} {path}"
    splits = splits_of(_listing(root, where), is_data, has_rows)
    kept_apart = (*splits.validation, *splits.test)
    if kept_apart and not splits.train:
        raise DataError(f"{where} has only files for validation or test, {named(kept_apart)}; name those that are to train, as in {flag} FILE")
    train, validation = (_present(root, names, where) for names in (splits.train, splits.validation))
    return DataFiles(root, train, validation, splits.sentence(where), _left_out(splits, where))


def scored_files(path: str, flag: str, is_data: Callable[[str], bool], has_rows: Callable[[str], bool]) -> DataFiles:
    """Return the files of a path for validation: of a directory with splits its validation split, of any other all.

    Raises:
        DataError: as `data_files`; or a directory has files for training and for test and none for validation.
    """
    root = Path(path)
    if not root.is_dir():
        found = data_files(path, flag, is_data, has_rows)
        return replace(found, sentence=found.sentence.replace(": training ", ": validation ", 1))
    where = f"{flag} {path}"
    splits = splits_of(_listing(root, where), is_data, has_rows)
    if splits.train and splits.test and not splits.validation:
        raise DataError(f"{where} has {named(splits.train)} for training, {named(splits.test)} for test and none for validation; name the files")
    chosen = splits.validation or splits.train or splits.test
    return DataFiles(root, _present(root, chosen, where), (), f"{where}: validation {named(chosen)}")


def _present(root: Path, names: Iterable[str], where: str) -> tuple[Path, ...]:
    """The paths of files that are there.

    Raises:
        DataError: one is a link to nothing.
    """
    files = tuple(root / name for name in names)
    if lost := [file for file in files if not file.exists()]:
        raise DataError(f"{lost[0]} in {where} is a link to nothing; mend or remove it")
    return files


def _left_out(splits: Splits, where: str) -> tuple[Finding, ...]:
    total = sum(map(len, (splits.train, splits.validation, splits.test, splits.others)))
    if not splits.others:
        return ()
    sentence = f"{len(splits.others):,} of {total:,} files in {where} belong to no split and are left out; name what is to train"
    return (Finding("files_left_out", len(splits.others), total, sentence),)


def _files_of_pattern(path: str) -> tuple[Path, ...]:
    return tuple(sorted(Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name))) if glob.has_magic(path) else ()


def _listing(root: Path, where: str) -> Listing:
    """The files of a directory, and the contents of those that describe it."""
    files = tuple(_names(root, _SKIPPED))
    documents = {}
    for name in files:
        if is_document(name):
            with contextlib.suppress(OSError):  # a link to nothing describes nothing, nor does a file that large
                documents[name] = read_bytes(root / name, _MOST_DOCUMENT_NBYTES).decode("utf-8", "replace")
    return Listing(where, str(root), files, documents)


def walk(root: Path, suffix: str, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield the files below a directory whose names end so, sorted by path.

    Hidden files and folders are left out. A link to a folder outside the directory is followed.

    Args:
        root: the directory.
        suffix: end of names; "" for any.
        skipped: names of folders that are left out.
    """
    return (root / name for name in _names(root, skipped) if name.endswith(suffix))


def _names(root: Path, skipped: frozenset[str]) -> Iterator[str]:
    """The paths of `walk` below the directory, with "/"."""
    inside = os.path.realpath(root)
    followed = set[str]()

    def is_walked(folder: str) -> bool:
        if not os.path.islink(folder):
            return True
        target = os.path.realpath(folder)
        if target in followed or os.path.commonpath([target, inside]) in (target, inside):  # walked elsewhere, or a circle
            return False
        followed.add(target)
        return True

    top = os.fspath(root)
    for directory, folders, names in os.walk(top, followlinks=True):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith(".") and is_walked(os.path.join(directory, f)))
        below = os.path.relpath(directory, top).replace(os.sep, "/") + "/" if directory != top else ""
        yield from (below + name for name in sorted(names) if not name.startswith("."))
