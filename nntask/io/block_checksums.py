"""Checksums of a file's blocks, compared when a block is first read.

A file of many gigabytes is read in small windows, so a checksum of the whole would cost a run its start. With one of every 64 KiB, nothing is read
that is not used, and nothing is used that was not compared. Checksums find errors of disks and copies, not forgery.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Final

BLOCK_NBYTES: Final = 64 << 10
HEAD_NBYTES: Final = 32 << 20
"""Bytes at the head of a file of the cache that are compared on opening, when it can still be made again: about 10 ms."""
_NUM_DIGITS: Final = 8


def block_checksums(path: Path) -> str:
    """Return the CRC-32 of every 64 KiB of a file, eight hexadecimal digits each.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(BLOCK_NBYTES), b""))


def discard(path: Path, fd: int) -> None:
    """Remove a changed file of the cache, so that the next run makes it again, unless another process has replaced it.

    Args:
        path: the file.
        fd: descriptor of the file that changed.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), os.fstat(fd)):
            path.unlink()


class BlockChecksums:
    """Checksums that a file is compared with.

    Args:
        digits: what `block_checksums` returned when the file was written.
        nbytes: present size of the file.

    Raises:
        ValueError: they belong to a file of another size, or are no checksums.
    """

    def __init__(self, digits: str, nbytes: int) -> None:
        num_blocks = -(-nbytes // BLOCK_NBYTES)
        if not isinstance(digits, str) or len(digits) != _NUM_DIGITS * num_blocks:
            raise ValueError(f"there must be {num_blocks} checksums, one of every {BLOCK_NBYTES // 1024} KiB")
        self._expected = bytes.fromhex(digits)
        self._is_equal = bytearray(num_blocks)

    def first_changed(self, fd: int, begin: int, end: int) -> int | None:
        """Return the offset of the first block that differs from its checksum; None if all are equal.

        Blocks that were equal before are not read again.

        Args:
            fd: descriptor of the file.
            begin, end: range of bytes; all blocks with one of them are compared.

        Raises:
            OSError: the file cannot be read.
        """
        for number in range(begin // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
            if self._is_equal[number]:
                continue
            found = zlib.crc32(os.pread(fd, BLOCK_NBYTES, number * BLOCK_NBYTES))
            if found != int.from_bytes(self._expected[4 * number : 4 * number + 4], "big"):
                return number * BLOCK_NBYTES
            self._is_equal[number] = 1
        return None
