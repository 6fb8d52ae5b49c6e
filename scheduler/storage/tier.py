"""The disk tier: one file in a directory that the user names, with direct I/O if the file system supports it.

The file is unlinked right after opening, so that no file remains after a kill and two runs may share a directory. Direct I/O bypasses the system's
page cache, which would count against the same memory limit; arenas and extents are aligned to pages for it. The machine reuses space within the
file; space beyond the tier's budget after fragmentation is returned to the file system.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import Final

from .arena import HostArena

_PUNCH_HOLE_KEEP_SIZE: Final = 3
_REFUSALS: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class DiskTier:
    """An anonymous file that holds extents.

    Args:
        directory: directory of the file, created if missing; its parent is not, because a missing parent is more likely a typing error.

    Attributes:
        is_direct: whether I/O bypasses the page cache.

    Raises:
        OSError: the directory cannot be created or written.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            parent = self.directory.absolute().parent
            if parent.is_dir():
                raise PermissionError(errno.EACCES, f"{parent} is not a writable directory", str(self.directory)) from error
            raise FileNotFoundError(errno.ENOENT, f"its parent directory {parent} does not exist", str(self.directory)) from error
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, "it is a file; give a directory", str(self.directory)) from error
        self._fd, name = tempfile.mkstemp(prefix="nntask-", suffix=".tier", dir=self.directory)
        try:
            os.unlink(name)
            self.is_direct = self._go_direct()
        except BaseException:
            os.close(self._fd)
            raise

    def free_bytes(self) -> int:
        """Return the free bytes of the file system for this user: the budget of a tier without a given size."""
        state = os.fstatvfs(self._fd)
        return state.f_bavail * state.f_frsize

    def write(self, arena: HostArena, source_offset: int, offset: int, nbytes: int) -> None:
        """Write whole pages from an arena.

        Raises:
            OSError: the disk is full or failed.
        """
        view = memoryview(arena.memory)[source_offset : source_offset + nbytes]
        done = 0
        while done < nbytes:
            done += os.pwrite(self._fd, view[done:], offset + done)

    def read(self, arena: HostArena, target_offset: int, offset: int, nbytes: int) -> None:
        """Read whole pages into an arena.

        Raises:
            OSError: the disk failed, or the bytes were never written.
        """
        view = memoryview(arena.memory)[target_offset : target_offset + nbytes]
        done = 0
        while done < nbytes:
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise OSError(errno.EIO, f"the tier file ends {nbytes - done} bytes before the end of an extent")
            done += got

    def discard(self, offset: int, nbytes: int) -> None:
        """Return an extent, whose bytes are not read any more, to the file system, if that supports it."""
        fallocate = _fallocate()
        if fallocate is not None:
            fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(offset), ctypes.c_longlong(nbytes))

    def close(self) -> None:
        """Close the file, which frees its space. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _go_direct(self) -> bool:
        """Switch to direct I/O if a page can be written and read with it; return whether it can."""
        import fcntl

        direct = getattr(os, "O_DIRECT", 0)
        if not direct:
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        page = mmap.mmap(-1, mmap.PAGESIZE)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | direct)
            os.pwrite(self._fd, page, 0)
            os.preadv(self._fd, [page], 0)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        finally:
            page.close()
        return True


def _fallocate() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return function
