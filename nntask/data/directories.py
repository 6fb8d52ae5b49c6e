"""Resolution of a path that a user names to data files: one file, the files of a pattern, or a directory with splits (`layout`)."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
        root: directory that file names are relative to.
        train: files for training; for `scored_files`, the files for validation.
        validation: files of the validation split; empty without one.
        sentence: report of the files used for each split; "" for a single file.
        findings: files that are left out.
    """

    root: Path
    train: tuple[Path, ...]
    validation: tuple[Path, ...] = ()
    sentence: str = ""
    findings: tuple[Finding, ...] = ()

    def name_of(self, file: Path) -> str:
        """Return the path of a file relative to the root."""
        return file.relative_to(self.root).as_posix()


def is_named(path: str) -> bool:
    """Return whether a path exists, or a pattern matches a file."""
    return Path(path).exists() or bool(_files_of_pattern(path))


def data_files(path: str, flag: str, is_data: Callable[[str], bool], has_rows: Callable[[str], bool]) -> DataFiles:
    """Return the files that a path names, by split.

    Args:
        path: file, directory, or pattern of files such as ``DIR/train_*.jsonl``; all files of a pattern are used for training.
        flag: command-line flag that names the path, for error messages.
        is_data: predicate on a file's name, whether the file can hold data of the wanted form.
        has_rows: predicate on a file's name, whether the file holds rows.

    Raises:
        DataError: the path does not exist, a file is a dangling link, or the layout does not determine the training files.
    """
    root, where = Path(path), f"{flag} {path}"
    if not root.is_dir():
        return _plain_files(path, flag, "training")
    splits = splits_of(_listing(root, flag), is_data, has_rows)
    kept_apart = (*splits.validation, *splits.test)
    if kept_apart and not splits.train:
        clause = f"{path} has only files for validation or test, {named(kept_apart)}"
        raise DataError(clause, f"name those that are to train, as in {flag} FILE", flag=flag)
    train, validation = (_present(root, names, where) for names in (splits.train, splits.validation))
    return DataFiles(root, train, validation, splits.sentence(where), _left_out(splits, where))


def scored_files(path: str, flag: str, is_data: Callable[[str], bool], has_rows: Callable[[str], bool]) -> DataFiles:
    """Return the files of a path for validation: the validation split of a directory that has splits, otherwise all files.

    Raises:
        DataError: see `data_files`; or a directory has files for training and for test but none for validation.
    """
    root, where = Path(path), f"{flag} {path}"
    if not root.is_dir():
        return _plain_files(path, flag, "validation")
    splits = splits_of(_listing(root, flag), is_data, has_rows)
    if splits.train and splits.test and not splits.validation:
        clause = f"{path} has {named(splits.train)} for training, {named(splits.test)} for test and none for validation"
        raise DataError(clause, "name the files", flag=flag)
    chosen = splits.validation or splits.train or splits.test
    return DataFiles(root, _present(root, chosen, where), (), f"{where}: validation {named(chosen)}")


def _plain_files(path: str, flag: str, split: str) -> DataFiles:
    """Return the files of a path that is no directory.

    Args:
        split: name of the split that they are for, in the report.

    Raises:
        DataError: the path does not exist, and is no pattern of a file.
    """
    root = Path(path)
    if root.exists():
        return DataFiles(root.parent, (root,))
    files = _files_of_pattern(path)
    if not files:
        raise DataError("does not exist", "give an existing file or directory, or a pattern that names a file", flag=flag, value=path)
    return DataFiles(Path(os.path.commonpath([file.parent for file in files])), files, (), f"{flag} {path}: {split} {named([*map(str, files)])}")


def _present(root: Path, names: Iterable[str], where: str) -> tuple[Path, ...]:
    """Return the paths of files, after checking that they exist; raise DataError if a file is a dangling link."""
    files = tuple(root / name for name in names)
    if lost := [file for file in files if not file.exists()]:
        raise DataError(f"{lost[0]} in {where} is a dangling link", "fix or remove it")
    return files


def _left_out(splits: Splits, where: str) -> tuple[Finding, ...]:
    total = sum(map(len, (splits.train, splits.validation, splits.test, splits.others)))
    if not splits.others:
        return ()
    sentence = f"{len(splits.others):,} of {total:,} files in {where} belong to no split and are left out; name what is to train"
    return (Finding("files_left_out", len(splits.others), total, sentence),)


def _files_of_pattern(path: str) -> tuple[Path, ...]:
    return tuple(sorted(Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name))) if glob.has_magic(path) else ()


def _listing(root: Path, flag: str) -> Listing:
    """Return the files of a directory, with the contents of those that describe it."""
    files = tuple(names_below(root, _SKIPPED))
    documents = {}
    for name in files:
        if is_document(name):
            with contextlib.suppress(OSError):  # dangling links and oversized files are ignored
                documents[name] = read_bytes(root / name, _MOST_DOCUMENT_NBYTES).decode("utf-8", "replace")
    return Listing(flag, str(root), files, documents)


def names_below(root: Path, skipped: frozenset[str]) -> Iterator[str]:
    """Yield the paths of the files below a directory, relative to it and separated by "/", in order; folders named in `skipped` are left out.

    Hidden files and folders are left out. A link to a folder outside the directory is followed.
    """
    inside = os.path.realpath(root)
    followed = set[str]()

    def is_walked(folder: str) -> bool:
        if not os.path.islink(folder):
            return True
        target = os.path.realpath(folder)
        if target in followed or os.path.commonpath([target, inside]) in (target, inside):  # visited elsewhere, or a cycle
            return False
        followed.add(target)
        return True

    top = os.fspath(root)
    for directory, folders, names in os.walk(top, followlinks=True):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith(".") and is_walked(os.path.join(directory, f)))
        below = os.path.relpath(directory, top).replace(os.sep, "/") + "/" if directory != top else ""
        yield from (below + name for name in sorted(names) if not name.startswith("."))
