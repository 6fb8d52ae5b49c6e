"""Memory of which only bytes are counted: data that arrives by itself, late-sized, above the budget, and leaves by its next use."""

from __future__ import annotations

import random

import pytest
from support.event_log import EventLog, describe

from scheduler.core.actions import carry_out
from scheduler.core.errors import DoesNotFit, InvalidEvent
from scheduler.core.events import (
    CopyFinished,
    CopyTile,
    DiscardExtent,
    Event,
    ForgetObject,
    HandleAdopted,
    HandleChanged,
    HandleReleased,
    MoveTile,
    ReportFailure,
    ReportStepDone,
    RunTask,
    TaskFinished,
    TaskSubmitted,
)
from scheduler.core.machine import Machine
from scheduler.core.memory.extents import PAGE
from scheduler.core.memory.memory_node import MemoryNode
from scheduler.core.performance_model import Models
from scheduler.core.policies import POLICIES
from scheduler.core.records import RAM, SCRATCH, HandleId, HandleRecord, Mode, NodeId, R, Task, TaskId
from scheduler.core.shortage import Shortage

DISK = NodeId(1)


class Program:
    """A machine over counted nodes, whose copies and tasks end when the test says so."""

    def __init__(self, ram: int, disk: int = 1000) -> None:
        self.fresh = lambda: Machine(
            [MemoryNode("ram", ram * PAGE, is_counted=True), MemoryNode("disk", disk * PAGE, is_storage=True, is_counted=True)],
            POLICIES["prio"](Models()),
        )
        self.machine = self.fresh()
        self.log = EventLog()
        self.seen: list[tuple[object, ...]] = []
        self.copies: list[CopyTile] = []
        self.running: list[Task] = []
        self.forgotten: list[tuple[NodeId, str]] = []
        self.refused: list[tuple[str, BaseException]] = []
        self.number = 0

    def handle(self, name: str, pages: int) -> HandleRecord:
        self.number += 1
        return HandleRecord(HandleId(self.number), pages * PAGE, pages * PAGE, None, name, "temporary", "data")

    def bring(self, event: Event) -> None:
        self.log.add(event)
        actions = self.machine.handle(event)
        self.machine.validate()
        self.seen += map(describe, actions)
        for action in actions:
            carry_out(action, self)

    def copy_tile(self, action: CopyTile) -> None:
        self.copies.append(action)

    def run_task(self, action: RunTask) -> None:
        self.running.append(action.task)

    def forget_object(self, action: ForgetObject) -> None:
        self.forgotten.append((action.node, action.handle.name))

    def report_failure(self, action: ReportFailure) -> None:
        self.refused.append((action.task.name, action.error))

    def move_tile(self, action: MoveTile) -> None:
        raise AssertionError("memory of which only bytes are counted was compacted")

    def discard_extent(self, action: DiscardExtent) -> None:
        raise AssertionError("an extent of a node without extents was discarded")

    def report_step_done(self, action: ReportStepDone) -> None:
        raise AssertionError("a replay ended, and none was started")

    def adopt(self, name: str, pages: int, next_use: int = 0, *, stays: bool = False) -> HandleRecord:
        handle = self.handle(name, pages)
        self.bring(HandleAdopted(handle, next_use, stays))
        return handle

    def submit(self, name: str, reads: list[HandleRecord], room: int, order: int, next_uses: list[int] | None = None) -> Task:
        accesses: list[tuple[HandleRecord, Mode]] = [(handle, R) for handle in reads]
        made = self.handle(f"room of {name}", room)
        made.released = True
        self.number += 1
        accesses.append((made, SCRATCH))
        next_uses = [*(next_uses or [1 << 40] * len(reads)), 1 << 40]
        task = Task(TaskId(self.number), None, name, ("host",), tuple(accesses), {}, order=order, next_uses=next_uses)
        self.bring(TaskSubmitted(task))
        return task

    def arrive(self) -> None:
        """Every copy under way ends, and those that follow."""
        while self.copies:
            copy = self.copies.pop(0)
            self.bring(CopyFinished(copy.source, copy.target))


def test_what_is_used_last_leaves_first_and_comes_back() -> None:
    """Room for a task is made by the furthest next use, written once; what is read again is fetched, and dropped without being written again."""
    program = Program(ram=8)
    soon, late, middle = (program.adopt(name, 2, due) for name, due in (("soon", 1), ("late", 90), ("middle", 40)))
    task = program.submit("makes 3", [soon], room=3, order=0, next_uses=[1])
    assert [copy.source.handle.name for copy in program.copies] == ["late"]
    program.arrive()
    assert program.forgotten == [(RAM, "late")]
    assert program.running == [task]
    program.bring(TaskFinished(task))
    program.submit("reads late", [late], room=4, order=1, next_uses=[95])
    program.arrive()
    assert [each.name for each in program.running] == ["makes 3", "reads late"]
    moved = program.machine.memory.moved_bytes
    assert moved[RAM, DISK] == 4 * PAGE  # late, then middle
    assert moved[DISK, RAM] == 2 * PAGE
    program.bring(TaskFinished(program.running[1]))
    program.submit("makes 5", [soon, middle], room=4, order=2)
    program.arrive()
    assert program.machine.memory.moved_bytes[RAM, DISK] == 4 * PAGE  # late was clean


@pytest.mark.parametrize("on_its_way", [False, True])
def test_what_a_task_changes_in_place_is_written_anew(on_its_way: bool) -> None:
    """Whether it was read back from the disk or is being written just now: what the disk has of it is out of date, and is never read."""
    program = Program(ram=8)
    data = program.adopt("data", 4, next_use=50)
    program.submit("makes 5", [], room=5, order=9)
    assert len(program.copies) == 1
    if not on_its_way:
        program.arrive()
        program.bring(TaskFinished(program.running.pop()))
    task = program.submit("changes", [data], room=1, order=1, next_uses=[60])
    if not on_its_way:
        program.arrive()
    assert program.running == [task]
    program.bring(HandleChanged(data))
    program.bring(TaskFinished(task))
    assert data.replicas[RAM].state == "modified"
    program.arrive()
    if not on_its_way:
        program.submit("makes 6", [], room=6, order=10)
    program.arrive()
    assert program.machine.memory.moved_bytes[RAM, DISK] == 8 * PAGE  # twice
    assert RAM not in data.replicas
    assert data.replicas[DISK].state == "shared"
    program.machine.validate()


def test_data_may_arrive_above_the_budget_and_then_nothing_is_admitted_until_it_is_met() -> None:
    """A result larger than its room is counted at once; the next task waits until the excess has left."""
    program = Program(ram=4)
    task = program.submit("makes", [], room=1, order=0)
    big = program.adopt("big", 6, next_use=9)
    assert program.machine.memory.used(RAM) == 7 * PAGE
    program.bring(TaskFinished(task))
    program.submit("next", [], room=1, order=1)
    assert len(program.running) == 1
    program.arrive()
    assert program.forgotten == [(RAM, "big")]
    assert len(program.running) == 2
    program.bring(HandleReleased(big))
    assert program.forgotten[-1] == (DISK, "big")
    assert not big.replicas


def test_what_the_program_holds_stays_and_a_task_that_never_fits_is_refused() -> None:
    """Held data is never a victim; nothing hangs, and letting it go makes room."""
    program = Program(ram=4)
    held = program.adopt("lent", 3, stays=True)
    program.submit("large", [], room=2, order=0)
    assert [name for name, _ in program.refused] == ["large"]
    assert isinstance(program.refused[0][1], DoesNotFit)
    program.bring(HandleReleased(held))
    assert program.machine.memory.used(RAM) == 0
    program.submit("large again", [], room=2, order=1)
    assert [task.name for task in program.running] == ["large again"]


def test_without_a_disk_what_the_program_holds_is_in_nobodys_way() -> None:
    """It stays, takes part in no reservation of the last tier, and the books add up."""
    machine = Machine([MemoryNode("ram", 4 * PAGE, is_counted=True)], POLICIES["prio"](Models()))
    held = HandleRecord(HandleId(0), 3 * PAGE, 3 * PAGE, None, "lent", "temporary", "data")
    assert machine.handle(HandleAdopted(held, stays=True)) == []
    machine.validate()
    assert machine.memory.held_bytes == machine.memory.used(RAM) == 3 * PAGE
    machine.handle(HandleReleased(held))
    machine.validate()
    assert machine.memory.used(RAM) == 0


def test_a_full_disk_refuses_data_and_nothing_changes() -> None:
    """Every block has a backing replica below before it counts."""
    program = Program(ram=4, disk=2)
    with pytest.raises(DoesNotFit, match="disk is full") as refusal:
        program.adopt("large", 3)
    assert refusal.value.shortage == Shortage("full", "disk", 3 * PAGE, 2 * PAGE, 0)
    program.machine.validate()
    assert [node.used for node in program.machine.memory.usage()] == [0, 0]


def test_data_does_not_appear_twice() -> None:
    """An adopted handle cannot be adopted again."""
    program = Program(ram=4)
    handle = program.adopt("x", 1)
    with pytest.raises(InvalidEvent, match="no data can appear"):
        program.bring(HandleAdopted(handle))


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_stay_within_the_bound_and_replay(seed: int) -> None:
    """Tasks read random data and make more or less than foreseen: counted bytes stay below the budget plus what was not foreseen of two tasks, every
    task runs, and the log replays to the same actions."""
    rng = random.Random(seed)
    program, workers, largest = Program(ram=12), 2, 4
    alive: list[HandleRecord] = []
    under_way: list[Task] = []
    order = num_submitted = peak = 0
    while num_submitted < 60 or under_way:
        assert not program.refused
        choice = rng.random()
        if choice < 0.4 and len(under_way) < workers and num_submitted < 60:
            reads = rng.sample(alive, min(len(alive), rng.randint(0, 2)))
            order, num_submitted = order + 1, num_submitted + 1
            next_uses = [order + rng.randint(1, 30) for _ in reads]
            under_way.append(program.submit(f"t{order}", reads, rng.randint(1, 3), order, next_uses))
        elif choice < 0.7 and program.copies:
            copy = program.copies.pop(rng.randrange(len(program.copies)))
            program.bring(CopyFinished(copy.source, copy.target))
        elif ready := [task for task in under_way if task in program.running]:
            task = rng.choice(ready)
            under_way.remove(task)
            alive.append(program.adopt(f"of {task.name}", rng.randint(1, largest), order + rng.randint(1, 30)))
            program.bring(TaskFinished(task))
            if len(alive) > 8:
                program.bring(HandleReleased(alive.pop(rng.randrange(len(alive)))))
        peak = max(peak, program.machine.memory.used(RAM))
    assert len(program.running) == 60
    assert peak <= (12 + workers * largest) * PAGE
    machine, again = program.fresh(), []
    for event in program.log.events():
        again += map(describe, machine.handle(event))
    assert again == program.seen
