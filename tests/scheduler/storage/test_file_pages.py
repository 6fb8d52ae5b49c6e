"""Pages of mapped files leave resident memory, and what a program has written to its own pages stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest

from scheduler.storage import release_file_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the mappings of a process")
NBYTES = 4 << 20


def _resident_file_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:"))


def _mapped(path: Path, access: int) -> mmap.mmap:
    path.write_bytes(b"\x07" * NBYTES)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, NBYTES, flags=mmap.MAP_PRIVATE, prot=access)
    finally:
        os.close(descriptor)


def test_pages_of_a_file_are_released_and_read_again(tmp_path: Path) -> None:
    """Resident memory falls by the pages of the file, whose bytes are the same afterwards."""
    path = (tmp_path / "read").resolve()
    memory = _mapped(path, mmap.PROT_READ)
    assert memory.read() == b"\x07" * NBYTES
    before = _resident_file_nbytes()
    assert release_file_pages(os.fsencode(path)) == NBYTES
    assert _resident_file_nbytes() <= before - NBYTES // 2
    memory.seek(0)
    assert memory.read() == b"\x07" * NBYTES


def test_pages_that_the_program_has_written_stay(tmp_path: Path) -> None:
    """A page of its own in a mapping that has become read-only, as relocated data of a library, keeps its bytes."""
    path = (tmp_path / "written").resolve()
    memory = _mapped(path, mmap.PROT_READ | mmap.PROT_WRITE)
    memory[5] = 9
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(NBYTES), mmap.PROT_READ) == 0
    assert release_file_pages(os.fsencode(path)) == 0
    assert memory[5] == 9


def test_a_process_runs_on_without_the_pages_of_its_libraries() -> None:
    """All files at once: code and constants are read again as they are used."""
    assert release_file_pages() > 1 << 20
    assert sorted([3, 1, 2]) == [1, 2, 3]
