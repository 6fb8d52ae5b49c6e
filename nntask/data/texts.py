"""Texts and corpora before tokenisation. Texts are read in pieces, never as a whole."""

from __future__ import annotations

import codecs
import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from ..errors import DataError
from .findings import Finding
from .opening import most_unpacked, opened, too_large

VALIDATION_SHARE: Final = 20
"""About one text in VALIDATION_SHARE is held out for validation if a dataset has no validation split."""
PIECE_NBYTES: Final = 1 << 20
_MOST_WRONG: Final = 0.1
"""Largest share of bytes that are not UTF-8 at the head of a text; a file with more is not a text."""
_SOME_WRONG: Final = 0.001
_FEW: Final = 8
"""Criterion for a text in an older encoding: the share exceeds `_SOME_WRONG`, there are more than `_FEW` such bytes, and they are the majority of the
bytes above 127."""
_BOM: Final = "\ufeff"
_MARKS: Final = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


@dataclass(slots=True)
class Replaced:
    """Counter of the bytes of texts that are not UTF-8.

    Attributes:
        nbytes: number of replaced bytes.
        total: number of bytes read.
        files: files with replaced bytes.
    """

    nbytes: int = 0
    total: int = 0
    files: list[Path] = field(default_factory=list)

    def add(self, path: Path, wrong: int, total: int) -> None:
        """Count the bytes of a piece of a file: `wrong` of its `total` bytes are replaced."""
        self.nbytes, self.total = self.nbytes + wrong, self.total + total
        if wrong and self.files[-1:] != [path]:
            self.files.append(path)


def decoded(file: IO[bytes], path: Path, replaced: Replaced | None = None) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of about 1 MiB, which end with a line or within a line that is longer than 1 MiB.

    Bytes that are not UTF-8 are replaced by U+FFFD. A byte order mark at the head of the file is left out.

    Args:
        file: open file, at its beginning.
        path: path of the file, for the counter and for error messages.
        replaced: counter of replaced bytes; None to count nothing.

    Raises:
        DataError: a compressed file unpacks to far more than its size.
    """
    rest, is_head, is_last, left = b"", True, False, most_unpacked(path)
    while not is_last:
        piece = file.read(PIECE_NBYTES)
        if piece and not piece.endswith(b"\n"):
            piece += file.readline(PIECE_NBYTES)
        is_last, left = not piece, left - len(piece)
        if left < 0:
            raise too_large(path)
        piece = rest + piece
        text, used = codecs.utf_8_decode(piece, "replace", is_last)
        rest = piece[used:]
        if replaced is not None:
            wrong = used - len(codecs.utf_8_decode(piece[:used], "ignore", True)[0].encode()) if "\ufffd" in text else 0
            replaced.add(path, wrong, used)
        if is_head and text:
            text, is_head = text.removeprefix(_BOM), False
        if text:
            yield text


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a corpus.

    Args:
        name: name of the text in the corpus.
        path: file of the text; None if the text is `content`.
        content: the text itself, if it has no file.
    """

    name: str
    path: Path | None
    content: str = ""

    def pieces(self, replaced: Replaced | None = None) -> Iterator[str]:
        """Yield the text in the pieces of `decoded`, which counts replaced bytes in `replaced` if it is given.

        Raises:
            DataError: the file cannot be read.
        """
        if self.path is None:
            yield self.content
            return
        with opened(self.path) as file:
            yield from decoded(file, self.path, replaced)

    def digest(self) -> bytes:
        """Return the SHA-256 of the text in UTF-8."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode("utf-8"))
        return digest.digest()


class Texts(Collection[Text]):
    """Concatenation of several collections of texts.

    Args:
        members: collections in order.
        select: number of texts to use, from the first; -1 for all.
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
    """Yield the texts of a collection that are files, without reading any other texts."""
    for member in texts.innermost() if isinstance(texts, Texts) else (texts,):
        if isinstance(member, tuple):
            yield from (text for text in member if text.path is not None)


def is_held_out(text: str) -> bool:
    """Return whether a row is held out for validation, by a hash of its text."""
    return int.from_bytes(hashlib.sha256(text.strip().encode("utf-8", "surrogateescape")).digest()[:8], "little") % VALIDATION_SHARE == 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts for training and for validation.

    Args:
        name: name of the file or directory.
        train: texts for training.
        validation: texts for validation; may be empty.
        sentences: reports of the files used for each split.
        findings: findings about files and rows that are left out.
    """

    name: str
    train: Collection[Text]
    validation: Collection[Text]
    sentences: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def fingerprints(self) -> tuple[str, str]:
        """Return a hash of the training texts, and one of the training and validation texts.

        Both depend on the texts and their order, not on names.
        """
        digest = hashlib.sha256()
        for text in self.train:
            digest.update(text.digest())
        train = digest.hexdigest()
        digest.update(b"validation")
        for text in self.validation:
            digest.update(text.digest())
        return train, digest.hexdigest()


def check_texts(texts: Collection[Text], path: str, flag: str) -> None:
    """Check that files are UTF-8 texts, by reading and decoding the first MiB of each.

    Args:
        texts: texts to check; texts without a file, and rows of tables, pass.
        path: file or directory that the user named.
        flag: command-line flag that names the path, for error messages.

    Raises:
        DataError: a file contains NUL bytes, is in another encoding, or cannot be read.
    """
    for text in in_files(texts):
        assert text.path is not None  # `in_files` yields files only
        with opened(text.path) as file:
            head = file.read(PIECE_NBYTES)
        wrong = _what_is_wrong(head)
        if wrong:
            which = f"{flag} {path}" if text.path == Path(path) else f"{text.path} in {flag} {path}"
            raise DataError(f"{which} is not text in UTF-8: {wrong}", "convert it, or leave it out (the tokenizer bytes takes any file)")


def _what_is_wrong(head: bytes) -> str:
    """Return why bytes are not a UTF-8 text, as a clause; "" if at most a few are wrong, which are counted when the text is encoded."""
    if mark := next((name for mark, name in _MARKS.items() if head.startswith(mark)), ""):
        return f"it begins with the byte order mark of {mark}"
    if b"\0" in head:
        return "it holds NUL bytes"
    try:
        head.decode("utf-8")
    except UnicodeDecodeError:
        wrong = len(head) - len(head.decode("utf-8", "ignore").encode("utf-8"))
        share, others = wrong / len(head), len(head.translate(None, bytes(range(128))))
        if share > _MOST_WRONG or (share > _SOME_WRONG and wrong > _FEW and wrong > others // 2):
            hint = "" if share > _MOST_WRONG else ", as in a text in an older encoding such as Windows-1252"
            return f"{share:{'.0%' if share > _MOST_WRONG else '.1%'}} of its bytes are no part of a character{hint}"
    return ""
