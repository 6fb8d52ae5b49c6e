"""Sources of text: the Python standard library of this machine, or files of the user.

A corpus is a list of texts in a fixed order; a file is one text, and so is a row of a table. A directory with a validation split is validated on it.
For any other a stable hash of each file's name, or of each row, holds texts out, so that these depend neither on the machine nor on the order of a
directory listing. Texts are read piece by piece.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import DataError
from .directories import DataFiles, data_files, scored_files, walk
from .findings import Finding
from .opening import inner_suffix
from .tables import TableTexts, check_tables, is_table
from .texts import VALIDATION_SHARE, Corpus, Text, Texts, in_files

STDLIB_NBYTES: Final = 8_000_000
_SKIPPED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__", "encodings", "ensurepip", "turtledemo"}
)
_MACHINE_ONLY: Final = ("config-", "pydoc_data/")
"""Folders whose sources are of this machine's build, or are topics already."""
_LINES: Final = (".jsonl", ".ndjson")
_TOPICS: Final = "pydoc/"


def stdlib_corpus(select: int = -1) -> Corpus:
    """The standard library's documentation topics and sources (with their docstrings): about 8 MB, in an order that mixes packages.

    Args:
        select: only the first `select` texts; -1 for all.
    """
    from pydoc_data import topics

    texts = [Text(_TOPICS + name, None, content.strip() + "\n") for name, content in sorted(topics.topics.items())]
    texts.append(Text(_TOPICS + "builtins", None, _builtin_docs()))
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [Text(str(path.relative_to(root).as_posix()), path) for path in walk(root, ".py", _SKIPPED)]
    texts += sorted((s for s in sources if not s.name.startswith(_MACHINE_ONLY)), key=lambda s: _hash(s.name))
    kept, nbytes = [], 0
    for text in texts:
        size = text.path.stat().st_size if text.path else len(text.content.encode())
        if nbytes + size <= STDLIB_NBYTES:
            kept.append(text)
            nbytes += size
    return _split("stdlib", kept[:select] if select > 0 else kept)


def text_corpus(path: str | os.PathLike[str], select: int = -1, val_path: str = "") -> Corpus:
    """The corpus of a text or a table, or of a directory or a pattern of them; empty files and rows are left out.

    Args:
        path: the file, directory or pattern.
        select: only the first `select` texts; -1 for all.
        val_path: the same for validation; "" for the validation split of `path`, or for texts that are held out.

    Raises:
        DataError: the path does not exist, holds no text, or holds a dangling link or a table that cannot be read.
    """
    found = data_files(str(path), "--dataset-path", _is_any, _has_rows)
    files, empty = _filled(found.train, f"--dataset-path {path}")
    sentences, findings = tuple(filter(None, (found.sentence,))), (*found.findings, *empty)
    name = Path(path).name
    if val_path:
        scored = scored_corpus(val_path)
        validation, sentences, findings = scored.train, sentences + scored.sentences, findings + scored.findings
    elif found.validation:
        held, empty = _filled(found.validation, f"--dataset-path {path}")
        validation = _texts(found, held)
        findings += empty + _empty_rows(validation)
    else:
        return _held_out(found, files, select, Corpus(name, (), (), sentences, findings))
    train = _texts(found, files)
    return Corpus(name, _first(train, select), validation, sentences, findings + _empty_rows(train))


def scored_corpus(path: str) -> Corpus:
    """The texts of --val-path, as the training texts of a corpus without validation texts.

    Raises:
        DataError: as `text_corpus`.
    """
    found = scored_files(path, "--val-path", _is_any, _has_rows)
    files, empty = _filled(found.train, f"--val-path {path}")
    texts = _texts(found, files)
    findings = (*found.findings, *empty, *_empty_rows(texts))
    return Corpus(Path(path).name, texts, (), (found.sentence,) if found.sentence else (), findings)


def _held_out(found: DataFiles, files: Sequence[Path], select: int, corpus: Corpus) -> Corpus:
    """The corpus with the texts of files without a validation split, about one in twenty of which is held out."""
    if not any(is_table(file.name) for file in files):
        whole = [Text(found.name_of(file), file) for file in files]
        split = _split(corpus.name, whole[:select] if select > 0 else whole)
        return replace(corpus, train=split.train, validation=split.validation)
    texts = _texts(found, files)
    held = frozenset(_split(corpus.name, [*in_files(texts)]).validation)
    train, validation = Texts([_kept(each, held) for each in texts.innermost()]), Texts([_held(each, held) for each in texts.innermost()])
    if not len(train):
        train, validation = texts, Texts(())
    findings = (*corpus.findings, *_empty_rows(train))
    return replace(corpus, train=_first(train, select), validation=validation if len(validation) else (), findings=findings)


def _kept(texts: Collection[Text], held: frozenset[Text]) -> Collection[Text]:
    return texts.of("train") if isinstance(texts, TableTexts) else tuple(text for text in texts if text not in held)


def _held(texts: Collection[Text], held: frozenset[Text]) -> Collection[Text]:
    return texts.of("validation") if isinstance(texts, TableTexts) else tuple(text for text in texts if text in held)


def _texts(found: DataFiles, files: Sequence[Path]) -> Texts:
    """The texts of files, neighbouring tables as one collection of rows."""
    members: list[Collection[Text]] = []
    for tables, group in itertools.groupby(files, lambda file: is_table(file.name)):
        neighbours = tuple(group)
        members.append(TableTexts(neighbours) if tables else tuple(Text(found.name_of(file), file) for file in neighbours))
    return Texts(members)


def _first(texts: Texts, select: int) -> Collection[Text]:
    return Texts((texts,), select) if select > 0 else texts


def _empty_rows(*texts: Collection[Text]) -> tuple[Finding, ...]:
    """A finding about the empty rows of tables; none if there are none."""
    tables = [table for each in texts if isinstance(each, Texts) for table in each.innermost() if isinstance(table, TableTexts)]
    count, total = sum(table.num_empty for table in tables), sum(table.num_rows for table in tables)
    return (Finding("rows_empty", count, total, f"{count:,} of {total:,} rows are empty and are left out"),) if count else ()


def _filled(files: Sequence[Path], where: str) -> tuple[list[Path], tuple[Finding, ...]]:
    """The files that are not empty, and a finding about the others.

    Raises:
        DataError: all are empty, or pyarrow is needed and missing.
    """
    filled = [file for file in files if file.stat().st_size > 0]
    if not filled:
        raise DataError(f"{where} holds no text; give a text file or a directory of text files that are not empty")
    check_tables(filled)
    count, total = len(files) - len(filled), len(files)
    sentence = f"{count:,} of {total:,} files in {where} are empty and are left out"
    return filled, (Finding("files_empty", count, total, sentence),) if count else ()


def _is_any(name: str) -> bool:
    return True


def _has_rows(name: str) -> bool:
    return is_table(name) or inner_suffix(name) in _LINES


def _split(name: str, texts: Sequence[Text]) -> Corpus:
    """Hold out about one text in twenty for validation; a single text is for training."""
    held = {t.name for t in texts if _hash(t.name) % VALIDATION_SHARE == 0} if len(texts) > 1 else set()
    if len(held) == len(texts):
        held = set()
    return Corpus(name, tuple(t for t in texts if t.name not in held), tuple(t for t in texts if t.name in held))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "little")


def _builtin_docs() -> str:
    """Docstrings of the built-in names, which have no source file in Python."""
    import builtins

    docs = [f"{name}\n{doc}\n" for name, value in sorted(vars(builtins).items()) if isinstance(doc := getattr(value, "__doc__", None), str)]
    return "\n".join(docs)
