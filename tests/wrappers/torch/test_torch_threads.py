"""The number of threads inside an operation of PyTorch is each thread's own: workers have that of their session from their first task on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wrappers.torch.tasks.step as step
from wrappers.torch import Session
from wrappers.torch.tasks.threads import Threads


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


def weights() -> dict[str, torch.Tensor]:
    """After a step of a small module, whose products MKL sums in other pieces on two threads."""
    torch.manual_seed(0)
    with Session(nn.Linear(128, 5), "sgd", lr=1.0, ram="16MB", workers=1, threads=1, loss=lambda y, _: y.square().sum()) as session:
        session.step(input=torch.randn(96, 128))
        return session.state_dict()


def test_bits_do_not_depend_on_what_a_worker_computed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task as the first one of a new thread has the bits of tasks on a worker whose number has been set."""
    made, failed = step._cpu_kernel, list[BaseException]()

    def settled(work: step._Work) -> Callable[..., None]:
        run = made(work)

        def after_setting(*views: Any, **terms: Any) -> None:
            torch.set_num_threads(1)
            run(*views, **terms)

        return after_setting

    def alone(work: step._Work) -> Callable[..., None]:
        run = made(work)

        def noted(*views: Any, **terms: Any) -> None:
            try:
                run(*views, **terms)
            except BaseException as error:
                failed.append(error)

        def in_a_new_thread(*views: Any, **terms: Any) -> None:
            thread = threading.Thread(target=noted, args=views, kwargs=terms)
            thread.start()
            thread.join()
            if failed:
                raise failed[0]

        return in_a_new_thread

    monkeypatch.setattr(step, "_cpu_kernel", settled)
    expected = weights()
    monkeypatch.setattr(step, "_cpu_kernel", alone)
    found = weights()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
