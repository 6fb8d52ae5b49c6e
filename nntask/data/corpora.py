"""Sources of text: the Python standard library of this machine, or files of the user.

A corpus is a list of texts in a fixed order; a file is one text, and so is a row of a table. A validation split in a directory is used for
validation. Otherwise a stable hash of each file's name, or of each row, selects the texts to hold out, so that the choice depends neither on the
machine nor on the order of a directory listing. Texts are read piece by piece.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from ..errors import DataError
from .directories import DataFiles, data_files, names_below, scored_files
from .findings import Finding, no_validation
from .objectives import Objective
from .opening import inner_suffix
from .row_counts import RowCounts
from .tables import TableTexts, check_tables, is_table
from .texts import VALIDATION_SHARE, Corpus, Text, Texts, in_files

STDLIB_NBYTES: Final = 8_000_000
_SKIPPED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__", "encodings", "ensurepip", "turtledemo"}
)
_MACHINE_ONLY: Final = ("config-", "pydoc_data/")
"""Folders to skip: their sources depend on this machine's build, or are already included as topics."""
_LINES: Final = (".jsonl", ".ndjson")
_TOPICS: Final = "pydoc/"
_SPLITS: Final[tuple[Literal["train", "validation"], ...]] = ("train", "validation")


def stdlib_corpus(select: int = -1) -> Corpus:
    """Return the standard library's documentation topics and sources (with docstrings): about 8 MB, in an order that mixes packages.

    Args:
        select: number of texts to keep, from the first; -1 for all.
    """
    from pydoc_data import topics

    texts = [Text(_TOPICS + name, None, content.strip() + "\n") for name, content in sorted(topics.topics.items())]
    texts.append(Text(_TOPICS + "builtins", None, _builtin_docs()))
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [Text(name, root / name) for name in names_below(root, _SKIPPED) if name.endswith(".py")]
    texts += sorted((s for s in sources if not s.name.startswith(_MACHINE_ONLY)), key=lambda s: _hash(s.name))
    chosen, nbytes = [], 0
    for text in texts:
        size = text.path.stat().st_size if text.path else len(text.content.encode())
        if nbytes + size <= STDLIB_NBYTES:
            chosen.append(text)
            nbytes += size
    return _split("stdlib", chosen[:select] if select > 0 else chosen)


def text_corpus(path: str | os.PathLike[str], select: int = -1, val_path: str = "") -> Corpus:
    """Return the corpus of a text file or table, or of a directory or pattern of such files; empty files and rows are left out.

    Args:
        path: file, directory or pattern.
        select: number of training texts to keep, from the first; -1 for all.
        val_path: file, directory or pattern for validation; "" for the validation split of `path`, or else for texts held out.

    Raises:
        DataError: the path does not exist, holds no text, or holds a dangling link or a table that cannot be read.
    """
    data = data_files(str(path), "--dataset-path", _is_any, _has_rows)
    flag = "--dataset-path"
    files, empty = _filled(data.train, path, flag)
    sentences, findings = tuple(filter(None, (data.sentence,))), (*data.findings, *empty)
    has_split = bool(val_path or data.validation)
    train, rows = _texts(data, files, "training" if has_split else "")
    _check_rows(train, rows, path, flag)
    findings += tuple(rows.findings())
    corpus = Corpus(Path(path).name, _first(train, select), (), sentences, findings)
    if val_path:
        scored = scored_corpus(val_path)
        return replace(corpus, validation=scored.train, sentences=sentences + scored.sentences, findings=findings + scored.findings)
    if data.validation:
        held, empty = _filled(data.validation, path, flag, " in its validation split")
        validation, rows = _texts(data, held, "validation")
        missing = () if validation else (no_validation(f"the validation split of {flag} {path}"),)
        return replace(corpus, validation=validation, findings=(*findings, *empty, *rows.findings(), *missing))
    return _held_out(data, files, select, train, corpus)


def scored_corpus(path: str) -> Corpus:
    """Return the texts of --val-path, as the training texts of a corpus without validation texts.

    Raises:
        DataError: see `text_corpus`.
    """
    data = scored_files(path, "--val-path", _is_any, _has_rows)
    files, empty = _filled(data.train, path, "--val-path")
    texts, rows = _texts(data, files, "validation")
    _check_rows(texts, rows, path, "--val-path")
    findings = (*data.findings, *empty, *rows.findings())
    return Corpus(Path(path).name, texts, (), (data.sentence,) if data.sentence else (), findings)


def _held_out(found: DataFiles, files: Sequence[Path], select: int, texts: Texts, corpus: Corpus) -> Corpus:
    """Return the corpus with about one in twenty of its texts held out for validation."""
    if not any(is_table(file.name) for file in files):
        whole = [Text(found.name_of(file), file) for file in files]
        split = _split(corpus.name, whole[:select] if select > 0 else whole)
        return replace(corpus, train=split.train, validation=split.validation)
    held = frozenset(_split(corpus.name, [*in_files(texts)]).validation)
    train, validation = (Texts([_in_split(each, held, split) for each in texts.innermost()]) for split in _SPLITS)
    if not len(train):
        train, validation = texts, Texts(())
    return replace(corpus, train=_first(train, select), validation=validation if len(validation) else ())


def _in_split(texts: Collection[Text], held: frozenset[Text], split: Literal["train", "validation"]) -> Collection[Text]:
    return texts.of(split) if isinstance(texts, TableTexts) else tuple(text for text in texts if (text in held) == (split == "validation"))


def _texts(found: DataFiles, files: Sequence[Path], split: str) -> tuple[Texts, RowCounts]:
    """Return the texts of some of the files, and the counts of their rows for a split, "" for both; consecutive tables become one collection."""
    members: list[Collection[Text]] = []
    counts = RowCounts(Objective(), split)
    for tables, group in itertools.groupby(files, lambda file: is_table(file.name)):
        neighbours = tuple(group)
        members.append(TableTexts(neighbours, counts) if tables else tuple(Text(found.name_of(file), file) for file in neighbours))
    return Texts(members), counts


def _first(texts: Texts, select: int) -> Collection[Text]:
    return Texts((texts,), select) if select > 0 else texts


def _check_rows(texts: Texts, rows: RowCounts, path: str | os.PathLike[str], flag: str) -> None:
    """Check that there is at least one text; raise DataError if the files are tables without rows, or with empty rows only."""
    if not len(texts):
        what = f"all of its {rows.num_rows:,} rows are empty" if rows.num_rows else "its tables have no rows"
        raise DataError(f"holds no text: {what}", "give rows with a text", flag=flag, value=path)


def _filled(files: Sequence[Path], path: str | os.PathLike[str], flag: str, split: str = "") -> tuple[list[Path], tuple[Finding, ...]]:
    """Return the files that are not empty, and a finding about the others; raise DataError if all are empty, or pyarrow is needed and missing.

    Args:
        path, flag: path that holds the files, and the flag that names it.
        split: split that they belong to, as the end of a clause; "" if that is clear.
    """
    filled = [file for file in files if file.stat().st_size > 0]
    if not filled:
        raise DataError(f"holds no text{split}", "give a text file or a directory of text files that are not empty", flag=flag, value=path)
    check_tables(filled)
    count, total = len(files) - len(filled), len(files)
    sentence = f"{count:,} of {total:,} files{split} in {flag} {path} are empty and are left out"
    return filled, (Finding("files_empty", count, total, sentence),) if count else ()


def _is_any(name: str) -> bool:
    return True


def _has_rows(name: str) -> bool:
    return is_table(name) or inner_suffix(name) in _LINES


def _split(name: str, texts: Sequence[Text]) -> Corpus:
    """Return a corpus with about one text in twenty held out for validation; a single text is used for training."""
    held = {t.name for t in texts if _hash(t.name) % VALIDATION_SHARE == 0} if len(texts) > 1 else set()
    if len(held) == len(texts):
        held = set()
    return Corpus(name, tuple(t for t in texts if t.name not in held), tuple(t for t in texts if t.name in held))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "little")


def _builtin_docs() -> str:
    """Return the docstrings of the built-in names, which have no Python source file."""
    import builtins

    docs = [f"{name}\n{doc}\n" for name, value in sorted(vars(builtins).items()) if isinstance(doc := getattr(value, "__doc__", None), str)]
    return "\n".join(docs)
