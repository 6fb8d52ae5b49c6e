"""Opening of untrusted paths: regular files only, and reads of limited size.

A path may lead to a pipe that never answers or to a device without an end. Readers of untrusted files open them here. A path that is not a regular
file raises an `OSError`, which the reader reports like any other failure to read.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final, TextIO

LARGEST_NBYTES: Final = 100 << 20
"""Default limit on the size in bytes of a file that is read as a whole."""
_PIECE: Final = 1 << 20


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file with flags of `os.open`; return its descriptor, which child processes do not inherit.

    Raises:
        OSError: the file cannot be opened, or is a directory, a pipe, a socket or a device.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0), 0o644)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, and must be a regular file", str(path))
    os.set_blocking(fd, True)
    return fd


def open_text(path: str | os.PathLike[str], errors: str = "strict") -> TextIO:
    """Open a regular file of UTF-8 text for reading, with errors handled as in `open`; raises the errors of `open_regular`."""
    return os.fdopen(open_regular(path), encoding="utf-8", errors=errors)


def read_bytes(path: str | os.PathLike[str], most: int = LARGEST_NBYTES) -> bytes:
    """Return the bytes of a regular file, at most `most`.

    Raises:
        OSError: see `open_regular`; or the file has more than `most` bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)  # read() allocates the requested size
        while len(content) <= most and (more := file.read(min(_PIECE, most + 1 - len(content)))):  # growing files, and /proc
            content += more
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def read_text(path: str | os.PathLike[str], most: int = LARGEST_NBYTES) -> str:
    """Return the text of a regular UTF-8 file of at most `most` bytes.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: the bytes are not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")
