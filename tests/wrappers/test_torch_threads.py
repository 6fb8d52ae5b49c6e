"""The number of threads inside an operation of PyTorch is each thread's own: workers have that of their session from their first task on."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from wrappers.torch.threads import Threads


def openmp() -> ctypes.CDLL:
    """The OpenMP library that PyTorch brings; other packages of the process may have loaded ones of their own."""
    home = str(Path(torch.__file__).parent)
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    found = sorted(path for path in loaded if path.startswith(home) and ("libgomp" in path or "libiomp" in path))
    if not found:
        pytest.skip("this PyTorch brings no OpenMP library")
    return ctypes.CDLL(found[0])


def in_a_thread(count: int) -> int:
    """OpenMP's number in a new thread that holds the sessions' number while sessions have `count`."""
    library, found = openmp(), list[int]()
    settings = Threads(count)

    def work() -> None:
        Threads.hold()
        found.append(library.omp_get_max_threads())

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        settings.end()
    return found[0]


@pytest.mark.parametrize("count", [1, 3])
def test_a_new_thread_has_the_number_of_the_session(count: int) -> None:
    """Not as many as there are cores, before any operation has asked."""
    before = torch.get_num_threads()
    assert in_a_thread(count) == count
    assert torch.get_num_threads() == before


def test_a_thread_that_stays_follows_the_next_session() -> None:
    """Workers of a runtime that is lent to one session after another."""
    library = openmp()
    for count in (1, 2):
        settings = Threads(count)
        try:
            Threads.hold()
            assert library.omp_get_max_threads() == count
        finally:
            settings.end()
