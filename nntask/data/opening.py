"""Opening of text files, with transparent decompression of gzip, bzip2 and xz by the standard library.

The format is recognised by a file's first bytes, not by its name. Errors name unsupported formats, and Git LFS pointers in place of data.
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
"""Suffixes of compressed files, which `inner_suffix` strips."""
_READERS: Final[Mapping[bytes, tuple[str, Callable[[IO[bytes]], Any]]]] = {
    b"\x1f\x8b\x08": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\x00": ("xz", lzma.open),
}
_BZIP2_BLOCK: Final = (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90")
"""Bytes that follow ``BZh`` and a digit in a bzip2 file, but not in a text."""
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
"""Limit on unpacked content, in bytes: a number for each byte of the file, plus a constant. Texts have about 4 bytes, repetitive ones 100."""


def inner_suffix(name: str) -> str:
    """Return the suffix of a file name in lower case, after a suffix of `PACKED` has been stripped."""
    root, suffix = os.path.splitext(name.lower())
    return os.path.splitext(root)[1] if suffix in PACKED else suffix


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed; errors of reading within the block are raised as `DataError`.

    Raises:
        DataError: the file cannot be read, is damaged, or is of an unsupported format.
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
        raise DataError(f"{path} is not a whole {kind} file: {error}", "copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", "copy it again, or leave it out") from None


def lines_in(file: IO[bytes], path: Path) -> Iterable[bytes]:
    """Return the lines of a file from `opened`, limited in size if the file is compressed.

    Raises:
        DataError: a line unpacks to more than 16 MiB and to more bytes than the file has; or all lines unpack to far more than the file.
    """
    return file if isinstance(file, io.BufferedReader) else _unpacked_lines(file, path)


def _unpacked_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of a compressed file; raises the errors of `lines_in`."""
    most, left = longest_line(path), most_unpacked(path)
    while line := file.readline(most + 1):
        check_line(len(line), most, path)
        left -= len(line)
        if left < 0:
            raise too_large(path)
        yield line


def most_unpacked(path: Path) -> int:
    """Return the limit on the unpacked content of a file, in bytes."""
    return _UNPACKED_PER_BYTE * path.stat().st_size + _UNPACKED_BESIDES


def too_large(path: Path) -> DataError:
    """Return the error for a file that unpacks to more than `most_unpacked`."""
    return DataError(f"{path} unpacks to more than {most_unpacked(path):,} bytes, far more than texts do", "unpack it to use it")


def longest_line(path: Path) -> int:
    """Return the limit on the size of a line, in bytes: 16 MiB or the file's size, which only compressed files can exceed."""
    return max(_LONGEST_LINE, path.stat().st_size)


def check_line(size: int, most: int, path: Path) -> None:
    """Check the size of a line, or of the part read so far.

    Raises:
        DataError: the size exceeds `most`.
    """
    if size > most:
        raise DataError(f"{path} has a line that unpacks to more than {most:,} bytes, and a line is held in memory", "unpack the file to use it")


def check_head(path: Path, head: bytes) -> None:
    """Check that a file's first bytes are not those of an unsupported format.

    Raises:
        DataError: the format is not supported.
    """
    if head.startswith(tuple(_UNREAD)):
        what = next(what for magic, what in _UNREAD.items() if head.startswith(magic))
        raise DataError(f"{path} {what}, or leave it out")
    _check_tar(path, head)


def _check_tar(path: Path, head: bytes) -> None:
    if head[_TAR] == b"ustar":
        raise DataError(f"{path} is a tar archive, which is not read", "unpack it with tar -xf, or leave it out")


def _reader_of(head: bytes) -> tuple[str, Callable[[IO[bytes]], Any] | None]:
    """Return (name, opener) of the compression that a file's first bytes show; ("", None) for a file that is not compressed."""
    for magic, (kind, reader) in _READERS.items():
        if head.startswith(magic) and (kind != "bzip2" or head[4:10] in _BZIP2_BLOCK):
            return kind, reader
    return "", None
