"""Sources of text: the Python standard library of this machine, or files of the user.

A corpus is a list of texts in a fixed order. A stable hash of each text's name splits it into training and validation, so the held-out texts depend
neither on the machine nor on the order of a directory listing. Texts are read piece by piece.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ..errors import DataError
from .tables import TABLES, RowText, check_tables
from .texts import Corpus, Text

STDLIB_NBYTES: Final = 8_000_000
_SKIPPED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__", "encodings", "ensurepip", "turtledemo"}
)
_TOPICS: Final = "pydoc/"
_VALIDATION_SHARE: Final = 20


def stdlib_corpus(select: int = -1) -> Corpus:
    """The standard library's documentation topics and sources (with their docstrings): about 8 MB, in an order that mixes packages.

    Args:
        select: only the first `select` texts; -1 for all.
    """
    from pydoc_data import topics

    texts = [Text(_TOPICS + name, None, content.strip() + "\n") for name, content in sorted(topics.topics.items())]
    texts.append(Text(_TOPICS + "builtins", None, _builtin_docs()))
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [Text(str(path.relative_to(root).as_posix()), path) for path in _walk(root, (".py",), _SKIPPED)]
    texts += sorted((s for s in sources if not s.name.startswith("pydoc_data/")), key=lambda s: _hash(s.name))
    kept, nbytes = [], 0
    for text in texts:
        size = text.path.stat().st_size if text.path else len(text.content.encode())
        if nbytes + size <= STDLIB_NBYTES:
            kept.append(text)
            nbytes += size
    return _split("stdlib", kept[:select] if select > 0 else kept)


def text_corpus(path: str | os.PathLike[str], select: int = -1, flag: str = "--dataset-path") -> Corpus:
    """The corpus of a text, parquet or arrow file, or of all files in a directory (sorted by path, hidden files left out).

    Args:
        path: the file or directory.
        select: only the first `select` texts; -1 for all.
        flag: the command-line flag that named the path, for error messages.

    Raises:
        DataError: the path does not exist, holds no text, or holds a dangling link or a table that cannot be read.
    """
    root = Path(path)
    if not root.exists():
        raise DataError(f"{flag} {root} does not exist; give a text file or a directory of text files")
    files = list(_walk(root, (), frozenset())) if root.is_dir() else [root]
    if lost := [file for file in files if not file.exists()]:
        raise DataError(f"{lost[0]} in {flag} {root} is a link to nothing; mend or remove it")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise DataError(f"{flag} {root} holds no text; give a text file or a directory of text files that are not empty")
    check_tables(files)
    texts = [_text(file.relative_to(root).as_posix() if root.is_dir() else file.name, file) for file in files]
    return _split(root.name, texts[:select] if select > 0 else texts)


def _text(name: str, file: Path) -> Text:
    return RowText(name, None, files=(file,)) if file.suffix in TABLES else Text(name, file)


def _split(name: str, texts: Sequence[Text]) -> Corpus:
    """Hold out about one text in twenty for validation; a single text is for training."""
    held = {t.name for t in texts if _hash(t.name) % _VALIDATION_SHARE == 0} if len(texts) > 1 else set()
    if len(held) == len(texts):
        held = set()
    return Corpus(name, tuple(t for t in texts if t.name not in held), tuple(t for t in texts if t.name in held))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "little")


def _walk(root: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Iterator[Path]:
    """The files below `root` with one of the suffixes, sorted by path; every file where no suffix is given."""
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith((".", "config-")))
        for name in sorted(names):
            if not name.startswith(".") and name.endswith(suffixes or ""):
                yield Path(directory, name)


def _builtin_docs() -> str:
    """Docstrings of the built-in names, which have no source file in Python."""
    import builtins

    docs = [f"{name}\n{doc}\n" for name, value in sorted(vars(builtins).items()) if isinstance(doc := getattr(value, "__doc__", None), str)]
    return "\n".join(docs)
