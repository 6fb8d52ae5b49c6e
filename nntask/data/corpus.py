"""Where text comes from: the Python standard library of this machine, or files of the user's.

A corpus is a list of texts in a fixed order, split into training and validation by a stable hash of each text's name, so neither the machine
nor the order of a directory listing decides what is held out. Texts are read piece by piece.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import DataError

STDLIB_NBYTES: Final = 8_000_000
_SKIPPED: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__", "encodings", "ensurepip", "turtledemo"}
)
_TOPICS: Final = "pydoc/"
_VALIDATION_SHARE: Final = 20
_PIECE_NBYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """One text: its name in the corpus, and its file or, for text that is in no file, its content."""

    name: str
    path: Path | None
    content: str = ""

    def pieces(self) -> Iterator[str]:
        """The text in pieces of about 1 MiB that end at a line's end; bytes that are not UTF-8 are replaced."""
        if self.path is None:
            yield self.content
            return
        try:
            with self.path.open("rb") as file:
                while lines := file.readlines(_PIECE_NBYTES):
                    yield b"".join(lines).decode("utf-8", "replace")
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None

    def digest(self) -> bytes:
        """A hash of the text."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode("utf-8"))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts for training and for validation."""

    name: str
    train: tuple[Text, ...]
    validation: tuple[Text, ...]

    def fingerprints(self) -> tuple[str, str]:
        """A hash of the training texts, and one of these and the validation texts. Names do not count: what they decide is order and split."""
        digest = hashlib.sha256()
        for text in self.train:
            digest.update(text.digest())
        train = digest.hexdigest()
        digest.update(b"validation")
        for text in self.validation:
            digest.update(text.digest())
        return train, digest.hexdigest()


def stdlib_corpus(select: int = -1) -> Corpus:
    """The standard library's documentation topics and sources (with their docstrings), about 8 MB in an order that mixes packages.

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
    """A text file, or all files of a directory (sorted by name, hidden ones left out).

    Args:
        select: only the first `select` texts; -1 for all.
        flag: that named the path, for messages.

    Raises:
        DataError: there is no such file or directory, or it holds no text.
    """
    root = Path(path)
    if not root.exists():
        raise DataError(f"{flag} {root} does not exist; give a text file or a directory of text files")
    files = list(_walk(root, (), frozenset())) if root.is_dir() else [root]
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise DataError(f"{flag} {root} holds no text; give a text file or a directory of text files that are not empty")
    texts = [Text(file.relative_to(root).as_posix() if root.is_dir() else file.name, file) for file in files]
    return _split(root.name, texts[:select] if select > 0 else texts)


def _split(name: str, texts: Sequence[Text]) -> Corpus:
    """Hold out about one text in twenty; never the only one."""
    held = {t.name for t in texts if _hash(t.name) % _VALIDATION_SHARE == 0} if len(texts) > 1 else set()
    if len(held) == len(texts):
        held = set()
    return Corpus(name, tuple(t for t in texts if t.name not in held), tuple(t for t in texts if t.name in held))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "little")


def _walk(root: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Iterator[Path]:
    """Files below `root` sorted by path; all suffixes when none is given."""
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith((".", "config-")))
        for name in sorted(names):
            if not name.startswith(".") and name.endswith(suffixes or ""):
                yield Path(directory, name)


def _builtin_docs() -> str:
    """Docstrings of the built-in names, which have no source file in Python."""
    import builtins

    parts = [f"{name}\n{doc}\n" for name, value in sorted(vars(builtins).items()) if isinstance(doc := getattr(value, "__doc__", None), str)]
    return "\n".join(parts)
