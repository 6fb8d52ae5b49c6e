"""The ledger of Dask results: sizes that are known late, bytes above the budget, what leaves by its next use, and no request left waiting."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from scheduler import DoesNotFit, Shortage
from wrappers.dask.graphs.blocks import Action, MemoryBlock, MemoryRequest, MoveBlock, RefuseTask, StartTask
from wrappers.dask.graphs.ledger import Ledger

LOST = OSError("the disk failed")


class Program:
    """A ledger whose copies and tasks end when the test says so; blocks and requests have names."""

    def __init__(self, ram: int, disk: int | None = 1000) -> None:
        self.ledger = Ledger(ram, disk)
        self.copies: list[MoveBlock] = []
        self.running: list[MemoryRequest] = []
        self.dropped: list[tuple[str, str]] = []
        self.refused: list[tuple[str, BaseException | None]] = []
        self.blocks: list[MemoryBlock] = []
        self.ended: set[str] = set()

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartTask(request):
                    assert all(block.state in ("memory", "writing", "spoilt", "both") for block in request.blocks)
                    self.running.append(request)
                case RefuseTask(request, error):
                    self.refused.append((request.client, error))
                case MoveBlock("write" | "read"):
                    self.copies.append(action)
                case MoveBlock(kind, block):
                    self.dropped.append((kind, block.owner))
        self.check()

    def check(self) -> None:
        """The counts are those of the blocks and requests."""
        ledger = self.ledger
        held = [block for block in self.blocks if block.is_counted or block.num_pins or block.state in ("writing", "spoilt", "reading")]
        resident = sum(block.size for block in held if block.state not in ("disk", "lost"))
        stuck = sum(block.size for block in held if block.stays)
        results = {request: request.result_nbytes for block in self.blocks for request in block.waiting} | {
            request: request.result_nbytes for request in self.running
        }
        assert ledger.used == resident + sum(results.values()) + ledger.fixed - stuck
        assert ledger.disk_used == (sum(block.size for block in held) if ledger.disk is not None else 0)
        assert ledger.num_copying == len(self.copies)
        for queue in (ledger._clean, ledger._dirty):
            assert all(before[:2] < after[:2] for before, after in pairwise(queue))
            assert all(entry[:2] == (entry[-1].next_use, entry[-1].number) and not entry[-1].num_pins for entry in queue)

    def adopt(self, name: str, size: int, next_use: int = 0) -> MemoryBlock:
        block = MemoryBlock(size, size, owner=name, next_use=next_use)
        self.ledger.adopt(block)
        self.blocks.append(block)
        self.check()
        return block

    def submit(self, name: str, reads: list[MemoryBlock], result_nbytes: int, order: int, *, min_nbytes: int = 1, depth: int = 0) -> MemoryRequest:
        request = MemoryRequest(name, 0, order, reads, result_nbytes, min_nbytes, depth)
        self.carry_out(self.ledger.request(request))
        return request

    def finish(self, request: MemoryRequest, next_use: int = 1 << 40) -> None:
        self.running.remove(request)
        self.ended.add(request.client)
        for block in request.blocks:
            block.next_use = next_use
        self.carry_out(self.ledger.finish(request))

    def end(self, copy: MoveBlock) -> None:
        self.copies.remove(copy)
        self.carry_out(self.ledger.end_copy(copy.block))

    def arrive(self) -> None:
        """End every copy, and those that follow."""
        while self.copies:
            self.end(self.copies[0])

    def finish_all(self, request: MemoryRequest, next_use: int = 1 << 40) -> None:
        """End the copies that a task waits for, and the task."""
        self.arrive()
        self.finish(request, next_use)

    @property
    def names(self) -> list[str]:
        """Names of the running tasks."""
        return [request.client for request in self.running]


def test_what_is_used_last_leaves_first_and_comes_back() -> None:
    """Room for a task is made by the furthest next use, written once; what is read again is fetched, and dropped without being written again."""
    program = Program(ram=8)
    soon, late, middle = (program.adopt(name, 2, due) for name, due in (("soon", 1), ("late", 90), ("middle", 40)))
    task = program.submit("makes 3", [soon], result_nbytes=3, order=0)
    assert [copy.block for copy in program.copies] == [late]
    program.arrive()
    assert program.dropped == [("forget", "late")]
    assert program.running == [task]
    program.finish(task, next_use=1)
    second = program.submit("reads late", [late], result_nbytes=4, order=1)
    program.arrive()
    assert program.running == [second]
    assert (program.ledger.written, program.ledger.read) == (4, 2)  # late, then middle
    program.finish(second, next_use=95)
    program.submit("makes 4", [soon, middle], result_nbytes=4, order=2)
    program.arrive()
    assert program.names == ["makes 4"]
    assert program.ledger.written == 4  # late was clean


@pytest.mark.parametrize(("next_use", "leaves"), [(118, "clean"), (122, "dirty")])
def test_what_was_written_before_leaves_first_unless_it_is_needed_twice_as_soon(next_use: int, leaves: str) -> None:
    """A block that must be written takes two copies to leave and come back, one that is on the disk takes one."""
    program = Program(ram=8)
    clean = program.adopt("clean", 4, next_use=110)
    program.finish_all(program.submit("makes 8", [], result_nbytes=8, order=100))
    program.finish_all(program.submit("reads", [clean], result_nbytes=1, order=100), next_use=110)
    dirty = program.adopt("dirty", 4, next_use=next_use)
    program.submit("makes 4", [], result_nbytes=4, order=100)
    program.arrive()
    assert {"clean": clean, "dirty": dirty}[leaves].state == "disk"
    assert {clean.state, dirty.state} != {"disk"}


@pytest.mark.parametrize("on_its_way", [False, True])
def test_what_a_task_changes_in_place_is_written_anew(on_its_way: bool) -> None:
    """Whether it was read back from the disk or is being written just now: what the disk has of it is out of date, and is never read."""
    program = Program(ram=8)
    data = program.adopt("data", 4, next_use=50)
    larger = program.submit("makes 5", [], result_nbytes=5, order=9)
    assert [copy.kind for copy in program.copies] == ["write"]
    if not on_its_way:
        program.arrive()
        program.finish(larger)
    task = program.submit("changes", [data], result_nbytes=1, order=1)
    if not on_its_way:
        program.arrive()
    assert program.running == [task]
    program.ledger.change(data)
    program.finish(task, next_use=60)
    assert data.state == ("spoilt" if on_its_way else "memory")
    program.arrive()
    if not on_its_way:
        program.submit("makes 6", [], result_nbytes=6, order=10)
    program.arrive()
    assert program.ledger.written == 8  # twice
    assert data.state == "disk"


def test_data_may_arrive_above_the_budget_and_then_nothing_is_admitted_until_it_is_met() -> None:
    """A result larger than expected is counted at once; the next task waits until the excess has left."""
    program = Program(ram=4)
    task = program.submit("makes", [], result_nbytes=1, order=0)
    big = program.adopt("big", 6, next_use=9)
    assert (program.ledger.used, program.ledger.is_full) == (7, True)
    program.finish(task)
    results = program.submit("needs no bytes", [big], result_nbytes=0, order=1, min_nbytes=0)
    program.finish(results, next_use=9)
    program.submit("next", [], result_nbytes=1, order=2)
    assert program.names == []
    program.arrive()
    assert program.dropped == [("forget", "big")]
    assert program.names == ["next"]
    program.carry_out(program.ledger.release(big))
    assert program.dropped[-1] == ("discard", "big")
    assert program.ledger.peak == 7


def test_what_the_program_holds_stays_and_a_task_that_never_fits_is_refused() -> None:
    """A lent block is never a victim; nothing hangs, and dropping it makes room. Lending alone is no peak."""
    program = Program(ram=4)
    program.carry_out(program.ledger.hand_over(program.adopt("lent", 3)))
    assert (program.ledger.fixed, program.ledger.used, program.ledger.peak, program.ledger.disk_used) == (3, 3, 3, 0)
    program.submit("large", [], result_nbytes=2, order=0, min_nbytes=2)
    assert program.refused == [("large", None)]
    program.carry_out([*program.ledger.count(-3)])
    program.submit("large again", [], result_nbytes=2, order=1)
    assert (program.names, program.ledger.fixed, program.ledger.used) == (["large again"], 0, 2)


def test_a_result_may_be_smaller_than_others_of_its_kind() -> None:
    """A task whose expected result does not fit runs once nothing else can free bytes."""
    program = Program(ram=4)
    first = program.submit("first", [], result_nbytes=1, order=0)
    program.submit("second", [], result_nbytes=9, order=1)
    assert program.names == ["first"]
    program.finish(first)
    assert (program.names, program.ledger.used) == (["second"], 1)


def test_a_later_task_runs_if_the_first_one_never_fits_before_it() -> None:
    """Without a disk the first task waits for bytes that only the second one frees."""
    program = Program(ram=4, disk=None)
    block = program.adopt("block", 3)
    running = program.submit("running", [], result_nbytes=1, order=0)
    program.submit("large", [], result_nbytes=3, order=1, min_nbytes=3)
    second = program.submit("reads block", [block], result_nbytes=1, order=2)
    assert program.names == ["running"]
    program.finish(running)
    assert program.running == [second]
    program.carry_out(program.ledger.release(block))
    program.finish(second)
    assert program.names == ["large"]


def test_nested_graphs_go_first() -> None:
    """The tasks that wait for them hold memory; among the waiting ones, one that fits can be forced in."""
    program = Program(ram=8)
    outer = program.submit("outer", [program.adopt("input", 4)], result_nbytes=1, order=0)
    program.submit("waits", [], result_nbytes=7, order=1)
    program.submit("inner", [], result_nbytes=2, order=9, depth=1)
    assert program.names == ["outer", "inner"]
    program.submit("large inner", [], result_nbytes=3, order=10, depth=1)
    program.submit("small inner", [], result_nbytes=1, order=11, depth=1)
    assert program.names == ["outer", "inner"]
    program.carry_out(program.ledger.force())
    assert program.names == ["outer", "inner", "small inner"]
    assert program.ledger.force() == []
    program.carry_out(program.ledger.withdraw("large inner"))
    for request in [*program.running]:
        program.finish(request)
    assert outer not in program.running
    program.arrive()
    assert program.names == ["waits"]


def test_a_full_disk_refuses_data_and_nothing_changes() -> None:
    """Every block has bytes on the disk before it counts."""
    program = Program(ram=4, disk=2)
    with pytest.raises(DoesNotFit, match="disk is full") as refusal:
        program.ledger.adopt(MemoryBlock(3, 3))
    assert refusal.value.shortage == Shortage("full", "disk", 3, 2, 0)
    program.check()
    assert program.ledger.used == 0


def test_what_cannot_be_written_stays_and_something_else_leaves() -> None:
    """Its bytes are fixed until it is released."""
    program = Program(ram=6)
    stuck, other = program.adopt("stuck", 3, next_use=90), program.adopt("other", 3, next_use=10)
    program.submit("makes 3", [], result_nbytes=3, order=0)
    (copy,) = program.copies
    program.copies.remove(copy)
    program.carry_out(program.ledger.stay(copy.block))
    assert (copy.block, program.ledger.fixed) == (stuck, 3)
    program.arrive()
    assert (program.names, other.state) == (["makes 3"], "disk")
    program.carry_out(program.ledger.release(stuck))
    assert (program.ledger.fixed, program.ledger.used) == (0, 3)


def test_after_a_failed_write_nothing_is_written_and_waiting_tasks_hear_of_it() -> None:
    """Data in memory stays readable; what is clean may still leave."""
    program = Program(ram=6)
    data = program.adopt("data", 4, next_use=90)
    program.submit("makes 3", [], result_nbytes=3, order=0, min_nbytes=3)
    copy = program.copies.pop()
    program.carry_out(program.ledger.fail_copy(copy.block, LOST))
    assert program.refused == [("makes 3", LOST)]
    program.submit("reads", [data], result_nbytes=1, order=1)
    assert program.names == ["reads"]
    assert not program.copies


def test_a_failed_read_loses_one_block_only() -> None:
    """The tasks that wait for it, and later ones, are refused with the error; what else they asked for is free again."""
    program = Program(ram=6)
    lost, other = program.adopt("lost", 3, next_use=90), program.adopt("other", 3, next_use=99)
    program.submit("makes 6", [], result_nbytes=6, order=0)
    program.arrive()
    program.finish(program.running[0])
    program.submit("reads both", [lost, other], result_nbytes=0, order=1, min_nbytes=0)
    assert [copy.kind for copy in program.copies] == ["read", "read"]
    copy = next(copy for copy in program.copies if copy.block is lost)
    program.copies.remove(copy)
    program.carry_out(program.ledger.fail_copy(lost, LOST))
    assert program.refused == [("reads both", LOST)]
    program.arrive()
    assert program.names == []
    program.submit("reads lost", [lost], result_nbytes=1, order=2)
    program.submit("reads other", [other], result_nbytes=1, order=3)
    assert (program.refused[1:], program.names) == ([("reads lost", LOST)], ["reads other"])
    program.carry_out(program.ledger.release(lost))
    assert program.dropped[-1] == ("discard", "lost")


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_stay_within_the_bound_and_end(seed: int) -> None:
    """Tasks of nested and other graphs read, change and make random data, more or less than expected, while copies end in any order or fail to
    write: the counts are right after each step, memory stays below the budget plus the excess of the tasks under way, and no request is left."""
    rng = random.Random(seed)
    program, workers, largest, count = Program(ram=12), 2, 4, 60
    alive: list[MemoryBlock] = []
    requests: list[MemoryRequest] = []
    order = lent = 0
    while order < count or len(requests) > len(program.ended) or program.copies:
        under_way = [request for request in requests if request.client not in program.ended]
        choice = rng.random()
        if choice < 0.4 and len(under_way) < workers and order < count:
            order += 1
            reads = rng.sample(alive, min(len(alive), rng.randint(0, 2)))
            requests.append(program.submit(f"t{order}", reads, rng.randint(1, 3), order, depth=rng.randint(0, 1)))
        elif choice < 0.7 and program.copies:
            copy = rng.choice(program.copies)
            if copy.kind == "write" and copy.block.size == 1 and rng.random() < 0.2:
                program.copies.remove(copy)
                program.carry_out(program.ledger.stay(copy.block))
            else:
                program.end(copy)
        elif program.running:
            request = rng.choice(program.running)
            if request.blocks and rng.random() < 0.3:
                program.ledger.change(request.blocks[0])
            alive.append(program.adopt(f"of {request.client}", rng.randint(1, largest), order + rng.randint(1, 30)))
            program.finish(request, next_use=order + rng.randint(1, 30))
            unread = [block for block in alive if not any(block in request.blocks for request in under_way)]
            if len(alive) > 8 and unread:
                block = rng.choice(unread)
                alive.remove(block)
                if block.state != "disk" and not lent and block.size < 3:
                    lent = block.size
                    program.carry_out(program.ledger.hand_over(block))
                else:
                    program.carry_out(program.ledger.release(block))
        if lent and rng.random() < 0.1:
            program.carry_out([*program.ledger.count(-lent)])
            lent = 0
        assert not program.refused
    assert program.ledger.peak <= 12 + workers * largest


def test_a_forced_request_takes_as_little_as_it_may() -> None:
    """Its result is expected to be as large as others of its kind, but the tasks that wait for it free nothing."""
    ledger = Ledger(100, None)
    outer = MemoryRequest("outer", 0, 0, [], 60, 10, 0)
    assert ledger.request(outer) == [StartTask(outer)]
    inner = MemoryRequest("inner", 0, 1, [], 50, 10, 1)
    assert ledger.request(inner) == []
    assert ledger.force() == [StartTask(inner)]
    assert ledger.used == 70


def test_fewer_fixed_bytes_raise_no_peak() -> None:
    """Bytes that are counted twice while a block changes hands are no use of memory."""
    ledger = Ledger(100, None)
    ledger.count(30)
    ledger.used += 50
    ledger.count(-10)
    assert ledger.peak == 30
