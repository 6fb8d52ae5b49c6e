"""Stalled seconds are those in which ready work waited for copies or memory beside an idle worker, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from support.plain_tasks import plain_task

from scheduler.core.events import Event, TaskSubmitted
from scheduler.core.machine import Machine
from scheduler.core.memory.extents import PAGE
from scheduler.core.memory.memory_node import MemoryNode
from scheduler.core.policies import Prio
from scheduler.core.records import RW, SCRATCH, HandleId, HandleRecord, HandleSpec, Mode, R, W, WorkerKind
from scheduler.simulation.virtual_time import VirtualDriver

COPY_SECONDS, TASK_SECONDS = 2, 3


class Watched(VirtualDriver):
    """Virtual seconds with stalls counted; one device node beside host memory."""

    def __init__(self, pages: int, workers: int) -> None:
        machine = Machine([MemoryNode("ram", 64 * PAGE), MemoryNode("gpu", pages * PAGE)], Prio())
        self.stalls = machine.stalls
        joined: list[tuple[WorkerKind, int, int]] = [("sim", 1, 1)] * workers
        super().__init__(machine, joined, lambda task, kind: TASK_SECONDS, transfer=lambda source, target, nbytes: COPY_SECONDS)
        self._num = 0

    def bring(self, event: Event) -> None:
        """Count after each event."""
        super().bring(event)
        self.stalls.update(round(self.now * 1e9))

    def submit(self, kind: WorkerKind, *accesses: tuple[HandleRecord, Mode]) -> None:
        """A task."""
        self._num += 1
        self.bring(TaskSubmitted(plain_task(self._num, f"task {self._num}", (kind,), accesses, order=self._num)))

    def stalled_seconds(self) -> float:
        """After everything has run."""
        self.run()
        assert not self.machine.num_unfinished
        assert not self.stalls.stalled
        return self.stalls.nanoseconds / 1e9


def handles(sizes: Sequence[int]) -> list[HandleRecord]:
    """Handles of so many pages."""
    return [HandleRecord(HandleId(at), HandleSpec(pages * PAGE, pages * PAGE, None, "", "persistent", "data")) for at, pages in enumerate(sizes)]


def test_an_idle_worker_that_waits_for_a_copy_is_stalled() -> None:
    """For as long as the copy takes; the worker without any task is not, nor the one whose task waits for another task."""
    driver = Watched(pages=8, workers=3)
    data, result = handles([1, 1])
    driver.submit("host", (data, W))
    driver.run()
    driver.submit("sim", (data, R), (result, W))
    driver.submit("sim", (result, RW))
    assert driver.stalled_seconds() == COPY_SECONDS
    assert driver.stalls.by_worker == {0: COPY_SECONDS * 10**9}
    assert driver.now == COPY_SECONDS + 2 * TASK_SECONDS


def test_idle_workers_are_stalled_while_tasks_wait_for_memory() -> None:
    """As many as there are tasks in the line: one of two idle workers first, then none while the only task left runs."""
    driver = Watched(pages=2, workers=3)
    scratch = handles([2])[0]
    driver.submit("sim", (scratch, SCRATCH))
    driver.submit("sim", (scratch, SCRATCH))
    assert driver.stalled_seconds() == TASK_SECONDS
    assert list(driver.stalls.by_worker.values()) == [TASK_SECONDS * 10**9]


def test_work_that_runs_is_no_stall() -> None:
    """Room for everything, nothing to copy."""
    driver = Watched(pages=8, workers=2)
    for handle in handles([1, 1, 1, 1]):
        driver.submit("sim", (handle, W))
    assert driver.stalled_seconds() == 0
