"""Texts and corpora before tokenisation. Texts are read piece by piece."""

from __future__ import annotations

import codecs
import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import DataError
from .findings import Finding
from .opening import opened

VALIDATION_SHARE: Final = 20
"""One text in so many is held out for validation where a dataset has no validation split."""
PIECE_NBYTES: Final = 1 << 20
_MOST_WRONG: Final = 0.1
"""Share of bytes that are not UTF-8, at the head of a file, above which it is no text; one in another alphabet's old encoding has more."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a corpus.

    Args:
        name: its name in the corpus.
        path: its file; None if the text is `content`.
        content: the text itself, if it is in no file.
    """

    name: str
    path: Path | None
    content: str = ""

    def pieces(self) -> Iterator[str]:
        """The text in pieces of about 1 MiB, which end at the end of a line, or within a line that is longer than 1 MiB.

        Bytes that are not UTF-8 are replaced by U+FFFD.

        Raises:
            DataError: the file cannot be read.
        """
        if self.path is None:
            yield self.content
            return
        with opened(self.path) as file:
            decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            while piece := file.read(PIECE_NBYTES):
                if not piece.endswith(b"\n"):
                    piece += file.readline(PIECE_NBYTES)
                if text := decode(piece):
                    yield text
            if text := decode(b"", final=True):
                yield text

    def digest(self) -> bytes:
        """The SHA-256 of the text in UTF-8."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode("utf-8"))
        return digest.digest()


class Texts(Collection[Text]):
    """Several collections of texts as one.

    Args:
        members: the collections, in order.
        select: only the first `select` texts; -1 for all.
    """

    def __init__(self, members: Sequence[Collection[Text]], select: int = -1) -> None:
        self._members, self._select = members, select

    def __len__(self) -> int:
        count = sum(map(len, self._members))
        return count if self._select < 0 else min(count, self._select)

    def __iter__(self) -> Iterator[Text]:
        return itertools.islice(itertools.chain.from_iterable(self._members), None if self._select < 0 else self._select)

    def __contains__(self, text: object) -> bool:
        return any(each == text for each in self)

    def innermost(self) -> Iterator[Collection[Text]]:
        """Yield the innermost collections."""
        for member in self._members:
            yield from member.innermost() if isinstance(member, Texts) else (member,)


def in_files(texts: Collection[Text]) -> Iterator[Text]:
    """Yield the texts of a collection that are files, without reading others."""
    for member in texts.innermost() if isinstance(texts, Texts) else (texts,):
        if isinstance(member, tuple):
            yield from (text for text in member if text.path is not None)


def is_held_out(text: str) -> bool:
    """Whether a row is held out for validation, by a hash of its text."""
    return int.from_bytes(hashlib.sha256(text.strip().encode("utf-8", "surrogateescape")).digest()[:8], "little") % VALIDATION_SHARE == 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts for training and for validation.

    Args:
        name: name of the file or directory.
        train, validation: the texts.
        sentences: which files were taken for what.
        findings: files and rows that are left out.
    """

    name: str
    train: Collection[Text]
    validation: Collection[Text]
    sentences: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def fingerprints(self) -> tuple[str, str]:
        """A hash of the training texts, and a hash of the training and validation texts. Both depend on the texts and their order, not on names."""
        digest = hashlib.sha256()
        for text in self.train:
            digest.update(text.digest())
        train = digest.hexdigest()
        digest.update(b"validation")
        for text in self.validation:
            digest.update(text.digest())
        return train, digest.hexdigest()


def check_texts(texts: Collection[Text], path: str, flag: str) -> None:
    """Check that files are texts, by the first MiB of each; a text in UTF-8 costs its reading and decoding.

    Args:
        texts: the texts; those that are in no file, or in tables, pass.
        path: the file or directory of the user that they are from.
        flag: the command-line flag that named it, for the message.

    Raises:
        DataError: a file holds NUL bytes, or too much that is not UTF-8; or it cannot be read.
    """
    for text in in_files(texts):
        assert text.path is not None  # it is a file
        with opened(text.path) as file:
            head = file.read(PIECE_NBYTES)
        wrong = "it holds NUL bytes" if b"\0" in head else _what_is_wrong(head)
        if wrong:
            which = f"{flag} {path}" if text.path == Path(path) else f"{text.path} in {flag} {path}"
            raise DataError(f"{which} is not text in UTF-8: {wrong}; convert it, or leave it out (the tokenizer bytes takes any file)")


def _what_is_wrong(head: bytes) -> str:
    """Says how much of the bytes is not UTF-8; "" if it is little."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError:
        share = 1 - len(head.decode("utf-8", "ignore").encode("utf-8")) / len(head)
        return f"{share:.0%} of its bytes are no part of a character" if share > _MOST_WRONG else ""
    return ""
