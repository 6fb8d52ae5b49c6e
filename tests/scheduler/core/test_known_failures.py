"""Failures that runtimes of this kind are known for, each as the list of events that leads to it, replayed on the fake driver.

The driver notices a wrong value, a source or input that changes under its reader, bytes handed out twice, and an impossible event; the tests say
in addition what the machine does instead at the moment of the race.
"""

from __future__ import annotations

import pytest

from scheduler.core.errors import DoesNotFit, Stalled, TaskError, TierFailed
from scheduler.core.memory import victim_selection as victims
from scheduler.core.memory.extents import PAGE
from scheduler.core.memory.prefetch import PRESSED
from scheduler.core.records import RAM, RW, SCRATCH, HandleRecord, R, W, WorkerKind
from scheduler.testing import FakeDriver, Run

SIM, DISK = 1, 2


def written(driver: FakeDriver, *names: str, kind: WorkerKind = "host", pages: int = 1) -> list[HandleRecord]:
    """New handles that a worker of that kind has written."""
    handles = [driver.handle(pages, name) for name in names]
    for handle in handles:
        driver.submit((handle, W), kinds=(kind,))
        driver.drain()
    return handles


def empty_ram(driver: FakeDriver) -> None:
    """Push all data out of host memory: the program asks for working memory as large as all of it."""
    driver.submit((driver.handle(driver.machine.memory.budget(RAM) // PAGE, "all of it"), SCRATCH), kinds=("host",))
    driver.handles[-1].released = True
    driver.drain()


def fetch(driver: FakeDriver, handle: HandleRecord) -> None:
    """Bring data to host memory."""
    driver.submit((handle, R), kinds=("host",))
    driver.drain()


def states(*runs: Run) -> list[str]:
    """States of the runs' tasks."""
    return [run.task.state for run in runs]


def test_a_writer_waits_for_the_write_back_of_what_it_writes() -> None:
    """A write-back has no reader whose edge would protect it: a task that overwrites its source waits for it."""
    driver = FakeDriver((8, 2), [("sim", SIM, 2)])
    (a,) = written(driver, "a", kind="sim")
    blocked = driver.submit((driver.handle(2, "large"), W))
    assert states(blocked) == ["blocked"]
    assert driver.routes == [("a", SIM, RAM)]
    writer = driver.submit((a, RW))
    assert states(writer) == ["fetching"]
    driver.arrive(a, RAM)
    assert states(writer, blocked) == ["running", "blocked"]
    driver.drain()
    driver.check()


def test_old_data_is_not_fetched_for_a_reader_behind_its_next_writer() -> None:
    """To eviction it is worth nothing, so what was fetched next replaced it, then it came again: copies without end while a task waited."""
    driver = FakeDriver((60, 15), [("sim", SIM, 1)])
    (x,), (y, z, total) = written(driver, "x", pages=13), written(driver, "y", "z", "total")
    all_of_it = driver.handle(15)
    all_of_it.released = True
    fetched = driver.submit((x, R), (y, R), (z, R))
    driver.drain()
    emptied = driver.submit((all_of_it, SCRATCH))  # nobody looks ahead before something was evicted
    driver.drain()
    assert states(fetched, emptied) == ["done", "done"]
    step = driver.record([[(x, RW)], [(total, W)], [(total, R)], [(y, R)], [(z, R)], [(total, R), (y, R)]], {})
    step.replay()
    driver.arrive(x, SIM)
    (running,) = driver.running
    for _ in range(20):
        if not driver.copying:
            break
        driver.end(1)
    assert (driver.running, driver.copying) == ([running], {})
    driver.drain()
    driver.check()


def test_a_writer_waits_for_a_copy_whose_reader_was_cancelled() -> None:
    """The reader's other input is lost on its way, so nothing but the copy itself reads the data any more."""
    driver = FakeDriver((8, 4, 20), [("cpu", RAM, 1), ("sim", SIM, 2)], storage=True)
    a, b = written(driver, "a", "b")
    empty_ram(driver)
    fetch(driver, a)
    reader = driver.submit((a, R), (b, R), kinds=("sim",))
    writer = driver.submit((a, RW), kinds=("cpu",))
    assert driver.routes == [("a", RAM, SIM), ("b", DISK, SIM)]
    driver.arrive(b, SIM, TierFailed("data", "tier", "planted", reads=False))
    assert states(reader, writer) == ["cancelled", "fetching"]
    driver.arrive(a, SIM)
    assert states(writer) == ["running"]
    driver.drain()
    assert isinstance(reader.error, TaskError)


def test_memory_of_a_forgotten_handle_is_free_only_after_its_last_reader() -> None:
    """The program forgets data while a task reads it; the next task needs exactly that memory."""
    driver = FakeDriver((2,), [("cpu", RAM, 1), ("cpu", RAM, 1)])
    (a,) = written(driver, "a", pages=2)
    reader = driver.submit((a, R))
    driver.release(a)
    following = driver.submit((driver.handle(2, "b"), W))
    assert states(reader, following) == ["running", "blocked"]
    driver.finish(reader)
    assert states(following) == ["running"]
    driver.drain()
    driver.check()


def test_memory_that_a_running_task_reads_is_no_victim() -> None:
    """First in, first out names the data that a task reads: what came after it goes instead, and then nothing more until the task has ended."""
    driver = FakeDriver((2, 20), [("cpu", RAM, 1), ("cpu", RAM, 1), ("cpu", RAM, 1)], storage=True, eviction="fifo")
    a, b = written(driver, "a", "b")
    empty_ram(driver)
    fetch(driver, a)
    fetch(driver, b)
    reader = driver.submit((a, R))
    second, third = driver.submit((driver.handle(1, "c"), W)), driver.submit((driver.handle(1, "d"), W))
    assert states(reader, second, third) == ["running", "running", "blocked"]
    assert RAM in a.replicas
    assert RAM not in b.replicas
    driver.finish(reader)
    assert states(third) == ["running"]
    assert RAM not in a.replicas
    driver.drain()
    driver.check()


def test_memory_is_free_only_after_the_copies_out_of_it() -> None:
    """Evicted data is on its way out; its memory goes to the next task when it has arrived, not when the eviction was decided."""
    driver = FakeDriver((2, 20), [("cpu", RAM, 1)], storage=True)
    written(driver, "a", "b")
    following = driver.submit((driver.handle(2, "c"), W))
    assert sorted(driver.routes) == [("a", RAM, 1), ("b", RAM, 1)]
    driver.end(1)
    assert states(following) == ["blocked"]
    driver.end(0)
    assert states(following) == ["running"]
    driver.drain()
    driver.check()


def test_two_tasks_do_not_evict_each_others_inputs_on_one_node() -> None:
    """Room for three tiles, two tasks with two each: the second waits until the first has run, and every tile is fetched once."""
    driver = FakeDriver((3, 20), [("cpu", RAM, 1), ("cpu", RAM, 1)], storage=True)
    a, b, c, d = written(driver, "a", "b", "c", "d")
    empty_ram(driver)
    first, second = driver.submit((a, R), (b, R)), driver.submit((c, R), (d, R))
    assert states(first, second) == ["fetching", "blocked"]
    fetched = set(driver.routes)
    assert fetched == {("a", 1, RAM), ("b", 1, RAM)}
    driver.arrive(b, RAM)
    driver.arrive(a, RAM)
    assert states(first, second) == ["running", "blocked"]
    assert not driver.copying
    driver.finish(first)
    assert states(second) == ["fetching"]
    assert set(driver.routes) == {("c", 1, RAM), ("d", 1, RAM)}
    driver.drain()
    driver.check()


def test_two_devices_full_of_each_others_inputs() -> None:
    """Each device holds, as sole copies, what the task of the other one reads, and has no free bytes besides: both go by way of the last tier."""
    driver = FakeDriver((4, 2, 2), [("sim", 1, 1), ("sim", 2, 1)], "eager")
    a, b, c, d = (driver.handle(1, name) for name in "abcd")
    driver.submit((a, W), (b, W))
    driver.submit((c, W), (d, W))
    driver.drain()
    places = {handle.spec.name: max(handle.replicas) for handle in (a, b, c, d)}
    assert places == {"a": 1, "b": 1, "c": 2, "d": 2}
    first, second = driver.submit((c, RW), (d, RW)), driver.submit((a, RW), (b, RW))
    assert (first.task.node, second.task.node) == (1, 2)
    assert states(first, second) == ["blocked", "blocked"]
    assert {(name, source) for name, source, _ in driver.routes} == {("a", 1), ("b", 1), ("c", 2), ("d", 2)}
    driver.drain(lambda number: number - 1)
    assert states(first, second) == ["done", "done"]
    assert sum(driver.machine.memory.moved_bytes.values()) <= 8 * PAGE
    driver.check()


def test_sole_copies_everywhere_still_leave_the_device() -> None:
    """Host memory is full of dirty data, so what leaves the device goes straight to its backing replica, on the disk."""
    driver = FakeDriver((4, 2, 40), [("sim", SIM, 1)], storage=True)
    written(driver, "a", "b", kind="sim")
    kept = written(driver, "c", "d", "e", "f")
    assert driver.machine.memory.used(RAM) == 4 * PAGE
    assert all(handle.replicas[RAM].state == "modified" for handle in kept)
    task = driver.submit((driver.handle(2, "g"), W))
    assert states(task) == ["blocked"]
    assert sorted(driver.routes) == [("a", SIM, DISK), ("b", SIM, DISK)]
    driver.drain()
    assert states(task) == ["done"]
    assert driver.machine.memory.used(RAM) == 4 * PAGE
    driver.check()


def test_sole_copies_that_fill_the_last_tier_are_all_kept() -> None:
    """No memory has room and none lies below: the newcomer is refused with the numbers, and nothing that exists is sacrificed for it."""
    driver = FakeDriver((4, 2), [("cpu", RAM, 1), ("sim", SIM, 1)])
    kept = [*written(driver, "a", "b", kind="sim"), *written(driver, "c", "d", kind="cpu")]
    refused = driver.submit((driver.handle(1, "e"), W))
    driver.drain()
    assert isinstance(refused.error, DoesNotFit)
    assert "16,384 B are taken by data that has nowhere else to go" in str(refused.error)
    assert all(handle.replicas and handle.lost is None for handle in kept)
    driver.release(kept[0])
    following = driver.submit((driver.handle(1, "f"), W))
    driver.drain()
    assert states(following) == ["done"]
    driver.check()


def test_tasks_admitted_ahead_shrink_to_what_fits() -> None:
    """A device that takes three tasks ahead holds one while each of them fills its memory, and three again when they are small."""
    driver = FakeDriver((60, 4), [("sim", SIM, 3)])
    large = [driver.submit((driver.handle(4, f"large {at}"), W)) for at in range(9)]
    worker = driver.machine.workers[0]
    for at in range(9):
        assert states(large[at]) == ["running"]
        assert worker.assigned == [large[at].task]
        assert len(driver.machine._dispatch.blocked[SIM]) <= worker.depth
        driver.finish(large[at])
        while driver.copying:
            driver.end(0)
    small = [driver.submit((driver.handle(1, f"small {at}"), W)) for at in range(4)]
    driver.end(0)
    assert worker.assigned == [run.task for run in small[:3]]
    driver.drain()
    driver.check()


def test_little_is_fetched_ahead_while_a_task_waits_for_memory() -> None:
    """The depth shrinks under pressure: of free memory the blocked task soon needs all, so few copies may hold some of it."""
    driver = FakeDriver((400, 900), [("cpu", RAM, 1), ("cpu", RAM, 1)], storage=True)
    (a,), (b, *later) = written(driver, "a", pages=380), written(driver, *"bcdefg")
    empty_ram(driver)
    fetch(driver, a)
    fetch(driver, b)
    large, made = driver.handle(20, "large"), driver.handle(1, "made")
    step = driver.record([[(a, R)], [(b, R), (large, W), (made, W)], *([(each, R), (made, R)] for each in later)], {large: False, made: False})
    step.replay()
    first, second, *others = driver.runs[-2 - len(later) :]
    assert states(first, second, *others) == ["running", "blocked", *["waiting"] * len(later)]
    assert [name for name, _, target in driver.routes if target == RAM] == ["c", "d", "e", "f", "g"][:PRESSED]
    driver.finish(first)
    while states(second) == ["blocked"]:
        driver.end(0)
    assert states(second) == ["running"]
    driver.drain()
    driver.check()


def test_a_task_never_falls_back_to_another_kind_of_worker() -> None:
    """A busy device is waited for while a CPU worker idles; and a kind that nobody is of ends in an error with the story, not in another worker."""
    driver = FakeDriver((8, 2), [("cpu", RAM, 1), ("sim", SIM, 1)])
    first, second = (driver.submit((driver.handle(2, name), W), kinds=("sim",)) for name in "ab")
    assert states(first, second) == ["running", "ready"]
    driver.drain()
    assert [run.task.worker for run in (first, second)] == [1, 1]
    with pytest.raises(Stalled, match=r"workers are of kind cpu, sim") as stalled:
        driver.submit((driver.handle(1, "c"), W), kinds=("cuda",))
    assert (stalled.value.num_unfinished, stalled.value.num_ready, stalled.value.kinds) == (1, 1, ("cpu", "sim"))
    assert str(stalled.value).endswith(stalled.value.story)


def test_what_the_program_writes_is_not_fetched_ahead() -> None:
    """The next batch is being written in host memory while its planned reader on the device comes soon: it must not get the old or a torn one."""
    driver = FakeDriver((60, 3), [("sim", SIM, 1)])
    a, batch = written(driver, "a", "batch")
    driver.submit((driver.handle(3, "large"), W))  # evictions have happened: data is fetched ahead from now on
    step = driver.record([[(a, RW)], [(a, RW)], [(batch, R), (a, RW)]], {})
    driver.drain()
    driver.submit((a, RW))
    driver.drain()
    writer = driver.submit((batch, W), kinds=("host",))
    step.replay()
    assert states(writer, driver.runs[-3]) == ["running", "running"]
    assert not driver.routes
    driver.finish(writer)
    assert driver.routes == [("batch", RAM, SIM)]
    driver.drain()
    driver.check()


def test_data_lost_by_one_replay_is_made_again_by_the_next_at_the_minimum() -> None:
    """Both replays in flight have promised it, and the first fails while it makes it: the room stays with the promise of the second."""
    driver = FakeDriver((8,), [("cpu", RAM, 1), ("cpu", RAM, 1)])
    x, kept, y = driver.handle(1, "x"), driver.handle(4, "kept"), driver.handle(4, "y")
    step = driver.record([[(x, W)], [(x, R), (kept, W)], [(y, W)], [(y, R), (kept, R)]], {x: False, y: False})
    assert step.plan.minimum_bytes(is_last=True, computes=True) == 8 * PAGE
    step.replay()
    step.replay()
    first, second = driver.runs[:4], driver.runs[4:]
    driver.finish(first[0])
    driver.finish(first[1], RuntimeError("planted"))
    assert kept.lost is not None
    driver.finish(first[2])
    assert states(*second) == ["running", "waiting", "blocked", "waiting"]  # what is made ahead leaves the room of `kept`
    driver.drain()
    assert [run.error for run in second] == [None] * 4
    driver.check()


@pytest.mark.parametrize(("pages", "expected"), [((11, 8), "running"), ((11,), "blocked")])
def test_scratch_takes_no_room_where_nothing_computes(pages: tuple[int, ...], expected: str) -> None:
    """A disk need not keep room for the working memory of a task to come; memory that holds everything must."""
    driver = FakeDriver(pages, [("cpu", RAM, 1), ("cpu", RAM, 1)], storage=len(pages) > 1)
    x, y, z, scratch = driver.handle(1, "x"), driver.handle(2, "y"), driver.handle(2, "z"), driver.handle(8, "scratch")
    owned = dict.fromkeys((x, y, z, scratch), False)
    step = driver.record([[(x, W)], [(z, W), (x, R)], [(z, R), (scratch, SCRATCH)], [(y, W)], [(y, R)]], owned)
    assert step.plan.minimum_bytes(is_last=True, computes=len(pages) == 1) <= pages[-1] * PAGE
    step.replay()
    assert states(driver.runs[0], driver.runs[3]) == ["running", expected]
    driver.drain()
    driver.check()


def test_what_is_made_ahead_counts_before_its_own_position_alone() -> None:
    """From there on the plan has it: nothing waits although the hungriest task, which comes later, fills the memory."""
    driver = FakeDriver((12,), [("cpu", RAM, 1), ("cpu", RAM, 1)])
    x, y, z, scratch = driver.handle(1, "x"), driver.handle(2, "y"), driver.handle(2, "z"), driver.handle(8, "scratch")
    owned = dict.fromkeys((x, y, z, scratch), False)
    step = driver.record([[(x, W)], [(y, W)], [(z, W), (x, R)], [(z, R), (scratch, SCRATCH)], [(y, R)]], owned)
    assert step.plan.minimum_bytes(is_last=True, computes=True) == 12 * PAGE
    step.replay()
    assert states(*driver.runs[:2]) == ["running", "running"]
    driver.drain()
    assert [run.error for run in driver.runs] == [None] * 5
    driver.check()


def test_a_disk_tier_keeps_its_budget_beside_data_in_files() -> None:
    """A storage node has more addresses than its budget: that there is a hole does not mean that there is room."""
    driver = FakeDriver((2, 3), [("cpu", RAM, 1)], storage=True)
    driver.attach(driver.handle(1, "file"))
    runs = [driver.submit((driver.handle(1), W)) for _ in range(4)]
    driver.drain()  # the driver validates the ledger
    assert [run.error is None for run in runs] == [True, True, True, False]
    assert isinstance(runs[3].error, DoesNotFit)


def test_what_a_device_reads_makes_room_in_host_memory() -> None:
    """The backing replica of its result needs two pages in a row: one is free, the other holds a copy of its input, which is in the file too."""
    driver = FakeDriver((3, 4), [("sim", SIM, 1)])
    weight = driver.handle(1, "weight")
    driver.attach(weight)
    fetch(driver, weight)
    written(driver, "between")
    run = driver.submit((weight, R), (driver.handle(2, "result"), W))
    driver.drain()
    assert run.error is None
    driver.check()


def test_a_replica_that_becomes_a_backing_replica_stays() -> None:
    """A task writes data of a file that host memory has, and needs another backing replica there: the first one is no victim for the second."""
    driver = FakeDriver((2, 8), [("cpu", RAM, 2), ("sim", SIM, 2)])
    changed, other = driver.handle(1, "changed"), driver.handle(1, "other")
    for handle in (changed, other):
        driver.attach(handle)
        driver.submit((handle, R), kinds=("cpu",))
        driver.drain()
    run = driver.submit((changed, RW), (driver.handle(1, "result"), W), kinds=("sim",))
    driver.drain()
    assert run.error is None
    driver.check()


@pytest.mark.parametrize("eviction", ["lru", "next-use"])
def test_what_nobody_uses_any_more_goes_before_tiles_in_turn(eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is. Tiles that replaced their like in turn, beside memory full of old data, moved in every round."""
    monkeypatch.setattr(victims, "TINY", 64)  # a page is tiny
    driver = FakeDriver([128, 600], [("cpu", RAM, 1)], storage=True, eviction=eviction)
    written(driver, *(f"old {number}" for number in range(100)), kind="cpu")
    tiles = written(driver, *"abcd", kind="cpu", pages=12)
    for _ in range(2):
        moved = sum(driver.machine.memory.moved_bytes.values())
        for tile in tiles:
            driver.submit((tile, RW))
            driver.drain()
    assert sum(driver.machine.memory.moved_bytes.values()) == moved
    driver.check()


def test_a_lone_worker_is_filled_while_a_staged_task_runs() -> None:
    """Also when the task that has ended was not its only one: the next task's inputs would otherwise be fetched one task later."""
    driver = FakeDriver((60, 60), [("sim", SIM, 2)])
    runs = [driver.submit((driver.handle(name=f"x{number}"), W), kinds=("sim",)) for number in range(4)]
    assert [run.task.state for run in runs] == ["running", "staged", "ready", "ready"]
    driver.finish(runs[0])
    assert [run.task.state for run in runs] == ["done", "running", "staged", "ready"]
    driver.drain()
    driver.check()


def test_victims_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not anew with the end of every copy, while others of a blocked task's victims are still being written back."""
    plans = []
    plan = victims.Candidates.plan
    monkeypatch.setattr(victims.Candidates, "plan", lambda candidates, sizes, kept: plans.append(sizes) or plan(candidates, sizes, kept))
    driver = FakeDriver((6, 60), [("cpu", RAM, 4)], storage=True)
    written(driver, *"abcdef", kind="cpu")
    blocked = driver.submit((driver.handle(2, "large"), W))
    for name, _, disk in driver.routes:
        assert (states(blocked), len(plans)) == (["blocked"], 1)
        driver.arrive(next(handle for handle in driver.handles if handle.spec.name == name), disk)
    assert states(blocked) == ["running"]
    driver.drain()
    driver.check()
