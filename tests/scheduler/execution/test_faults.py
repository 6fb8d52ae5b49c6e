"""What breaks a real runtime, and what it breaks: every wait ends, with a typed error, and what is not touched stays usable."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler import Codelet, HandleLost, Runtime, TaskError
from scheduler.core.errors import RuntimeBroken
from scheduler.core.memory.extents import PAGE
from scheduler.execution.trace import Accesses, Trace

COUNT = PAGE // 8
DISK = {"cpu_workers": 2, "ram": 4 * PAGE}
SIM = {"cpu_workers": 0, "sim_gpus": 1, "gpu_memory": 4 * PAGE, "ram": 64 * PAGE}


class FatalTrace(Trace):
    """A trace that raises `error` in the thread that reports a task, or with `copies` a copy, once it is `armed`: that thread of the runtime dies."""

    def __init__(self, error: BaseException, *, copies: bool) -> None:
        super().__init__()
        self.error, self.copies, self.armed = error, copies, False

    def add_task(self, worker: int, name: str, task: int, start_ns: int, end_ns: int, node: int, accesses: Accesses) -> None:
        if self.armed and not self.copies:
            raise self.error

    def add_copy(self, source: int, target: int, name: str, nbytes: int, start_ns: int, end_ns: int, handle: int) -> None:
        if self.armed and self.copies:
            raise self.error


@pytest.mark.parametrize("error", [SystemExit(0), MemoryError("planted"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("machine", "copies", "name"),
    [(DISK, False, "nntask cpu:"), (SIM, False, "nntask sim:0"), (DISK, True, "nntask disk"), (SIM, True, "nntask copy")],
    ids=["worker", "device", "disk", "link"],
)
def test_a_thread_that_dies_is_named(machine: dict, copies: bool, name: str, error: BaseException, kit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Whoever waits is told which thread died of what, also of an exception that would end a program; another runtime works."""
    disk = {"disk": tmp_path} if machine is DISK else {}
    trace = FatalTrace(error, copies=copies)
    runtime = Runtime(trace=trace, **machine, **disk)
    handles = [kit.filled(runtime, at, f"h{at}", COUNT) for at in range(8)]
    with runtime.record() as step:
        for handle in handles:
            runtime.submit(kit.double, [(handle, "RW")])
    trace.armed = True

    def use() -> None:
        ticket = step.replay()
        ticket.wait()

    for wait in (use, runtime.wait, lambda: kit.value(runtime, handles[0]), lambda: kit.filled(runtime, 1)):
        with pytest.raises(RuntimeBroken, match=rf"{name}.*{type(error).__name__}") as caught:
            wait()
        assert caught.value.__cause__ is error
    runtime.close()
    with Runtime(**machine, **disk) as another:
        assert kit.value(another, kit.filled(another, 3)) == 3


@pytest.mark.parametrize("machine", [DISK, SIM], ids=["disk", "link"])
def test_a_kernel_that_fails_while_copies_are_under_way(machine: dict, kit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The failed task's outputs are lost and named; copies for others arrive, and everything else is as if it had not been submitted."""
    disk = {"disk": tmp_path} if machine is DISK else {"sim_bandwidth": 40 * PAGE}
    with Runtime(**machine, **disk) as runtime:
        handles = [kit.filled(runtime, at, f"h{at}", COUNT) for at in range(10)]
        for at in range(0, 10, 2):
            runtime.submit(kit.fail if at == 4 else kit.empty, [(handles[at], "RW"), (handles[at + 1], "R")])
        runtime.submit(kit.plus, [(handles[4], "R"), (handles[0], "R"), (handles[9], "RW")])
        with pytest.raises(TaskError, match=r"'fail'.* over RW h4, R h5 raised ZeroDivisionError: planted"):
            runtime.wait()
        for at, handle in enumerate(handles):
            if at in (4, 9):
                with pytest.raises(HandleLost, match=rf"'h{at}'.* planted"):
                    kit.value(runtime, handle)
                runtime.submit(kit.fill, [(handle, "W")], {"value": float(at)})
            assert kit.value(runtime, handle) == at


class Cyclic:
    """Something only a collection finds, whose finalizer collects once more and drops a handle."""

    def __init__(self, handle: Any, count: list[int]) -> None:
        self.me, self.handle, self.count = self, handle, count

    def __del__(self) -> None:
        self.count.append(1)
        self.handle = None
        gc.collect(0)


def test_finalizers_run_anywhere(kit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A collection at nearly every allocation, in the program, in workers and in copy threads, under the lock and outside it.

    Handles, outputs of replays and tickets die in cycles; every value is right, nothing hangs, and their memory comes back.
    """
    count: list[int] = []
    litter = threading.local()

    def messy(view: np.ndarray) -> None:
        litter.last = [Cyclic(None, count) for _ in range(3)]
        view += 1

    codelet = Codelet("messy", cpu=messy)
    before = gc.get_threshold()
    with Runtime(2, ram=12 * PAGE, disk=tmp_path) as runtime:
        total = kit.filled(runtime, 0, "total", COUNT)
        inputs = kit.filled(runtime, 1, "inputs", COUNT, kind="input")
        gc.set_threshold(20, 2, 2)
        try:
            for _ in range(6):
                with runtime.record() as step:
                    part = kit.handle(runtime, "part", COUNT)
                    runtime.submit(kit.fill, [(part, "W")], {"value": 0.0})
                    runtime.submit(codelet, [(part, "RW")])
                    runtime.submit(kit.add, [(part, "RW"), (inputs, "R")])
                    runtime.submit(kit.add, [(total, "RW"), (part, "R")])
                for _ in range(10):
                    ticket = step.replay()
                    for _ in range(4):
                        Cyclic(kit.filled(runtime, 5, "litter", COUNT), count)
                    loose = kit.handle(runtime, "loose", COUNT)
                    runtime.submit(kit.fill, [(loose, "W")], {"value": 2.0})
                    runtime.submit(codelet, [(loose, "RW")])
                    Cyclic((loose, ticket), count)
                    del loose
                assert ticket.read(part)[0] == 2
                Cyclic((step, ticket, part), count)
                del step, ticket, part
            assert kit.value(runtime, total) == 2 * 60
        finally:
            gc.set_threshold(*before)
        gc.collect()
        runtime.wait()
        kit.value(runtime, total)
        assert len(count) > 300
        assert runtime.stats()["resident_bytes"]["disk"] <= 4 * PAGE
