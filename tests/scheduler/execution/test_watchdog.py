"""The watchdog reports a standstill once, names what runs and what waits for what, and exists only if it is asked for."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from support.deadline import DEADLINE
from support.plain_tasks import plain_task

from scheduler import Codelet, Runtime
from scheduler.core.events import TaskSubmitted
from scheduler.core.machine import Machine
from scheduler.core.memory.extents import PAGE
from scheduler.core.memory.memory_node import MemoryNode
from scheduler.core.policies import Prio
from scheduler.core.records import RW, HandleId, HandleRecord, HandleSpec, Mode, R, W, WorkerKind
from scheduler.core.story import LENGTH, standstill
from scheduler.execution.watchdog import Patience, watchdog_seconds
from scheduler.simulation.virtual_time import VirtualDriver


class Errors(io.StringIO):
    """Standard error of a test, with an event that a report sets."""

    def __init__(self) -> None:
        super().__init__()
        self.has_report = threading.Event()

    def flush(self) -> None:
        """Note the report, which `print` ends by a flush."""
        if "no task has ended" in self.getvalue():
            self.has_report.set()


class Still(VirtualDriver):
    """One CPU worker and one device that executes nothing until `run`."""

    def __init__(self, ram: int, device: int) -> None:
        machine = Machine([MemoryNode("ram", ram * PAGE), MemoryNode("gpu", device * PAGE)], Prio())
        super().__init__(machine, [("cpu", 0, 1), ("sim", 1, 2)], lambda task, kind: 1.0, transfer=lambda source, target, nbytes: 1.0)
        self._num = 0

    def submit(self, name: str, kind: WorkerKind, *accesses: tuple[HandleRecord, Mode]) -> None:
        """Submit a task."""
        self._num += 1
        self.bring(TaskSubmitted(plain_task(self._num, name, (kind,), accesses, order=self._num)))

    def report(self) -> str:
        """Return the text about what runs and waits now."""
        machine = self.machine
        return standstill(machine.stalls.dispatch, machine.stalls.copying, machine.memory.name_of, machine.num_unfinished)


def handle(number: int, pages: int = 1) -> HandleRecord:
    """A handle called "h" and its number."""
    return HandleRecord(HandleId(number), HandleSpec(pages * PAGE, pages * PAGE, None, f"h{number}", "persistent", "data"))


def test_a_standstill_is_reported_once() -> None:
    """After the given time without an ended task, once; again only after another task has ended, and never while nothing is unfinished."""
    patience = Patience(10.0)
    assert [patience.is_over(now, 0, 0) for now in (0.0, 50.0)] == [False, False]
    assert [patience.is_over(now, 0, 3) for now in (60.0, 69.0, 70.0, 71.0, 500.0)] == [False, False, True, False, False]
    assert [patience.is_over(now, 1, 2) for now in (501.0, 510.0, 511.0, 600.0)] == [False, False, True, False]
    assert [patience.is_over(now, 3, 0) for now in (601.0, 700.0)] == [False, False]
    assert [patience.is_over(now, 3, 1) for now in (800.0, 809.0, 810.0)] == [False, False, True]


def test_a_report_names_every_cause() -> None:
    """A running task, one whose data is being copied, one that waits for memory, one that waits for a task, and those without a worker."""
    still = Still(ram=64, device=4)
    weights, batch, result, large = handle(1), handle(2), handle(3), handle(4, pages=4)
    still.submit("read", "host", (weights, W))
    still.run()
    still.submit("load", "cpu", (batch, W))
    still.submit("multiply", "sim", (weights, R), (result, W))
    still.submit("enlarge", "sim", (large, W))
    still.submit("update", "sim", (result, RW))
    still.submit("idle", "cpu", (handle(5), W))
    text = still.report()
    assert text.startswith("5 tasks are unfinished\nrunning:\n  task 2 load(W h2) on worker 0 (cpu)\nbeing copied:\n")
    for line in (
        "  handle 1 'h1' (",
        "  task 3 multiply(R h1, W h3) waits for the copy of handle 1 'h1'",
        f"  task 4 enlarge(W h4) waits for {4 * PAGE:,} B in gpu",
        "  task 5 update(RW h3) waits for task 3 multiply(R h1, W h3)",
        "  1 ready tasks wait for a worker that may take them",
    ):
        assert line in text
    still.run()
    assert still.report() == "0 tasks are unfinished\nrunning:\n  nothing\nbeing copied:\n  nothing\nwaiting:\n  nothing"


def test_a_report_is_short() -> None:
    """Of hundreds of tasks that wait for one, a few are named and the others counted."""
    still, shared = Still(ram=64, device=4), handle(1)
    still.submit("write", "cpu", (shared, W))
    for _ in range(300):
        still.submit("look", "cpu", (shared, R))
    assert still.report().endswith(f"  and {300 - LENGTH} more")
    assert len(still.report().splitlines()) == 7 + LENGTH


def test_a_program_is_told_what_it_waits_for(kit, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The report of a runtime names the kernel that does not return and the data that the program holds; then the run goes on."""
    errors, go = Errors(), threading.Event()
    monkeypatch.setenv("NNTASK_WATCHDOG", "0.01")
    monkeypatch.setattr(sys, "stderr", errors)
    stuck = Codelet("stuck", cpu=lambda *views: go.wait(DEADLINE) and None)
    with Runtime(cpu_workers=2, ram=1 << 20) as runtime:
        first, second = kit.filled(runtime, 1, "first"), kit.filled(runtime, 2, "second")
        with runtime.acquire(second, "R"):
            runtime.submit(stuck, [(first, "RW")])
            runtime.submit(kit.double, [(first, "RW")])
            runtime.submit(kit.double, [(second, "RW")])
            assert errors.has_report.wait(DEADLINE)
            go.set()
        runtime.wait()
        assert (kit.value(runtime, first), kit.value(runtime, second)) == (2, 4)
    text = errors.getvalue()
    assert text.startswith("nntask: no task has ended for 0.01 s; ")
    assert "stuck(RW first) on worker" in text
    assert "TaskSubmitted: " in text


def test_no_thread_watches_unasked(kit, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Without a request there is no watchdog; with one, the thread ends with the runtime. The program's number overrides the variable's."""

    def watchdogs() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "nntask watchdog"]

    monkeypatch.delenv("NNTASK_WATCHDOG", raising=False)
    with Runtime(cpu_workers=1, ram=1 << 20):
        assert not watchdogs()
    monkeypatch.setenv("NNTASK_WATCHDOG", "3600")
    with Runtime(cpu_workers=1, ram=1 << 20):
        assert len(watchdogs()) == 1
    assert not watchdogs()
    monkeypatch.setenv("NNTASK_WATCHDOG", "soon")
    with Runtime(cpu_workers=1, ram=1 << 20, watchdog=3600.0):
        assert len(watchdogs()) == 1
    assert not watchdogs()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan", "1 s"])
def test_a_watchdog_needs_a_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything but a positive number is refused before a thread starts."""
    with pytest.raises(ValueError, match=rf"NNTASK_WATCHDOG must be a positive number of seconds, got '{text}'"):
        watchdog_seconds({"NNTASK_WATCHDOG": text})
    monkeypatch.setenv("NNTASK_WATCHDOG", text)
    with pytest.raises(ValueError, match="NNTASK_WATCHDOG"):
        Runtime(cpu_workers=1, ram=1 << 20)
    assert watchdog_seconds({"NNTASK_WATCHDOG": ""}) is None
    assert watchdog_seconds({"NNTASK_WATCHDOG": "2.5"}) == 2.5


@pytest.mark.parametrize(("num_workers", "seconds"), [(1, 5e-4), (8, 5e-4), (16, 1e-3), (40, 2.5e-3)])
def test_many_workers_ask_less_often_for_the_interpreter(num_workers: int, seconds: float) -> None:
    """The interval in which threads ask for the interpreter grows with the number of workers beyond eight, and a runtime never raises it."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(5e-3)
        with Runtime(cpu_workers=num_workers, ram=1 << 20):
            assert sys.getswitchinterval() == pytest.approx(seconds, abs=2e-6)
        sys.setswitchinterval(1e-4)
        with Runtime(cpu_workers=num_workers, ram=1 << 20):
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=2e-6)
    finally:
        sys.setswitchinterval(before)
