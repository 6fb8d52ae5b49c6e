"""Files of text opened for reading, compressed ones unpacked on the way: gzip, bzip2 and xz by the standard library.

The first bytes of a file say what it is, whatever its name. Formats that are not read, and pointers of Git LFS in place of data, are named.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from ..errors import DataError
from ..io.regular_file import open_regular

PACKED: Final = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files, which `inner_suffix` looks behind."""
_READERS: Final[Mapping[bytes, tuple[str, Callable[[IO[bytes]], Any]]]] = {
    b"\x1f\x8b\x08": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\x00": ("xz", lzma.open),
}
_BZIP2_BLOCK: Final = (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90")
"""What follows ``BZh`` and a digit in a bzip2 file, and in no text."""
_UNREAD: Final = {
    b"\x28\xb5\x2f\xfd": "is compressed by Zstandard, which is not read; unpack it with zstd -d",
    b"PK\x03\x04": "is a zip archive, which is not read; unpack it with unzip",
    b"7z\xbc\xaf\x27\x1c": "is a 7z archive, which is not read; unpack it",
    b"\x04\x22\x4d\x18": "is compressed by LZ4, which is not read; unpack it with lz4 -d",
    b"version https://git-lfs.github.com/spec/": "is a pointer of Git LFS, not the file itself; fetch it with git lfs pull",
}
_TAR: Final = slice(257, 262)
_HEAD_NBYTES: Final = 512
_LONGEST_LINE: Final = 16 << 20
_UNPACKED_PER_BYTE: Final = 256
_UNPACKED_BESIDES: Final = 16 << 20
"""Bytes of unpacked content: for each byte of the file, and besides. Texts have about four, and those that repeat themselves a hundred."""


def inner_suffix(name: str) -> str:
    """The suffix of a name, in lower case, without that of a compression."""
    root, suffix = os.path.splitext(name.lower())
    return os.path.splitext(root)[1] if suffix in PACKED else suffix


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, unpacked; errors of reading it within the block become those of data.

    Raises:
        DataError: the file cannot be read, is damaged, or is of a format that is not read.
    """
    kind = ""
    try:
        with os.fdopen(open_regular(path), "rb") as packed:
            head = packed.peek(_HEAD_NBYTES)[:_HEAD_NBYTES]
            check_head(path, head)
            kind, reader = _reader_of(head)
            if reader is None:
                yield packed
                return
            with reader(packed) as file:
                _check_tar(path, file.peek(_HEAD_NBYTES))
                yield file
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole {kind} file: {error}; copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; copy it again, or leave it out") from None


def lines_in(file: IO[bytes], path: Path) -> Iterable[bytes]:
    """Return the lines of a file that `opened` has opened; a file that is not compressed bounds them itself.

    Raises:
        DataError: at a line that unpacks to more than 16 MiB and more than the file has; or if all of them unpack to far more than the file.
    """
    return file if isinstance(file, io.BufferedReader) else _unpacked_lines(file, path)


def _unpacked_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The lines of a compressed file.

    Raises:
        DataError: a line unpacks to more bytes than the file has, and to more than 16 MiB; or all of them to far more than the file.
    """
    most, left = longest_line(path), most_unpacked(path)
    while line := file.readline(most + 1):
        check_line(len(line), most, path)
        left -= len(line)
        if left < 0:
            raise too_large(path)
        yield line


def most_unpacked(path: Path) -> int:
    """Return how many bytes the content of a file may have when it is unpacked."""
    return _UNPACKED_PER_BYTE * path.stat().st_size + _UNPACKED_BESIDES


def too_large(path: Path) -> DataError:
    """Return the error of a file that unpacks to more than `most_unpacked`."""
    return DataError(f"{path} unpacks to more than {most_unpacked(path):,} bytes, far more than texts do; unpack it to use it")


def longest_line(path: Path) -> int:
    """Return the largest size of a line of a file: 16 MiB, or that of the file, which only a compressed file exceeds."""
    return max(_LONGEST_LINE, path.stat().st_size)


def check_line(size: int, most: int, path: Path) -> None:
    """Check the size of a line, or of its beginning.

    Raises:
        DataError: it is larger than `most`.
    """
    if size > most:
        raise DataError(f"{path} has a line that unpacks to more than {most:,} bytes, and a line is held in memory; unpack the file to use it")


def check_head(path: Path, head: bytes) -> None:
    """Refuse a file whose first bytes are those of a format that is not read.

    Raises:
        DataError: they are.
    """
    if head.startswith(tuple(_UNREAD)):
        what = next(what for magic, what in _UNREAD.items() if head.startswith(magic))
        raise DataError(f"{path} {what}, or leave it out")
    _check_tar(path, head)


def _check_tar(path: Path, head: bytes) -> None:
    if head[_TAR] == b"ustar":
        raise DataError(f"{path} is a tar archive, which is not read; unpack it with tar -xf, or leave it out")


def _reader_of(head: bytes) -> tuple[str, Callable[[IO[bytes]], Any] | None]:
    """Name of the compression of a file that begins so, and what unpacks it; None for a file that is not compressed."""
    for magic, (kind, reader) in _READERS.items():
        if head.startswith(magic) and (kind != "bzip2" or head[4:10] in _BZIP2_BLOCK):
            return kind, reader
    return "", None
