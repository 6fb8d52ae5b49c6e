"""Memory that Dask's settings would give back and take anew with every message."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from nntask.hardware.allocator import reuse_freed_memory
if sys.argv[1] == "reuse":
    assert reuse_freed_memory()
bytearray(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    bytearray(1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

KEPT = """
import threading, psutil
from nntask.hardware.allocator import give_back_freed, reuse_freed_memory
def used():
    return psutil.Process().memory_info().rss >> 20
def work(begun, end):
    held = [bytearray(8 << 20) for _ in range(12)]
    piece = bytearray(200 << 10)
    del held
    begun.set()
    end.wait()
assert reuse_freed_memory()
before, end = used(), threading.Event()
threads = []
for _ in range(3):
    begun = threading.Event()
    threads.append(threading.Thread(target=work, args=(begun, end)))
    threads[-1].start()
    begun.wait()
kept = used() - before
give_back_freed()
print(kept, used() - before)
end.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's allocator")
def test_large_pieces_are_taken_once() -> None:
    """As Dask starts its workers, each megabyte is 256 page faults; afterwards there are none."""
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}
    as_dask, ours = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], env=environment, capture_output=True, text=True, check=True).stdout)
        for how in ("as it is", "reuse")
    )
    assert as_dask > 20_000
    assert ours < 1_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's allocator")
def test_freed_memory_stays_until_it_is_given_back() -> None:
    """Three threads free 96 MiB each below a piece in use: no threshold finds that, and telling glibc does."""
    said = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True).stdout
    kept, left = map(int, said.split())
    assert kept > 250
    assert left < 50
