"""Checksums of a file's blocks, each verified when the block is first read.

A file of many gigabytes is read in small windows, and verifying a checksum of the whole file would delay the start of a run. With one checksum for
every 64 KiB, only blocks that are used are read, and every block is verified before use. Checksums detect errors of disks and copies, not forgery.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Final

BLOCK_NBYTES: Final = 64 << 10
HEAD_NBYTES: Final = 32 << 20
"""Bytes at the head of a cached file that are verified on opening, while the file can still be rebuilt; takes about 10 ms."""
_NUM_DIGITS: Final = 8


def block_checksums(path: Path) -> str:
    """Return the CRC-32 of every 64 KiB of a file, eight hexadecimal digits each.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(BLOCK_NBYTES), b""))


def discard(path: Path, fd: int) -> None:
    """Remove a corrupt file, open as `fd`, from the cache, so that the next run rebuilds it, unless another process has replaced it already."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), os.fstat(fd)):
            path.unlink()


class BlockChecksums:
    """Expected checksums of a file, with a record of the blocks that have been verified.

    Args:
        digits: result of `block_checksums` when the file was written.
        nbytes: present size of the file.

    Raises:
        ValueError: `digits` does not have one checksum per block of the file, or is not hexadecimal.
    """

    def __init__(self, digits: str, nbytes: int) -> None:
        num_blocks = -(-nbytes // BLOCK_NBYTES)
        if not isinstance(digits, str) or len(digits) != _NUM_DIGITS * num_blocks:
            raise ValueError(f"there must be {num_blocks} checksums, one of every {BLOCK_NBYTES // 1024} KiB")
        self._expected = bytes.fromhex(digits)
        self._is_equal = bytearray(num_blocks)

    def first_changed(self, fd: int, begin: int, end: int) -> int | None:
        """Return the offset of the first block that does not match its checksum; None if all match.

        Blocks that have been verified before are not read again.

        Args:
            fd: descriptor of the file.
            begin, end: byte range; every block that overlaps it is verified.

        Raises:
            OSError: the file cannot be read.
        """
        for number in range(begin // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
            if self._is_equal[number]:
                continue
            checksum = zlib.crc32(os.pread(fd, BLOCK_NBYTES, number * BLOCK_NBYTES))
            if checksum != int.from_bytes(self._expected[4 * number : 4 * number + 4], "big"):
                return number * BLOCK_NBYTES
            self._is_equal[number] = 1
        return None
