"""Data that begins in files: read when it is wanted, as often as it had to leave, never written elsewhere before the program writes it."""

from __future__ import annotations

import gc
import json
import threading

import numpy as np
import pytest
from support.deadline import DEADLINE

from scheduler import Codelet, DoesNotFit, HandleLost, InlineRuntime, RecordingError, Runtime, TaskError, Trace
from scheduler.core.events import Action
from scheduler.core.memory.extents import PAGE
from scheduler.core.memory.prefetch import TASKS, Lookahead
from scheduler.core.records import FILE, RAM, RW, R, Task, W
from scheduler.testing import FakeDriver

COUNT = PAGE // 8
"""Numbers in a page."""


class Store:
    """Sources that fill a handle with a number and remember that they did."""

    def __init__(self, runtime, kit) -> None:  # type: ignore[no-untyped-def]
        self.runtime, self.kit = runtime, kit
        self.read: list[str] = []
        self.failure: BaseException | None = None

    def handle(self, value: float, name: str, scratch: int = 0, **options):  # type: ignore[no-untyped-def]
        """A handle whose source fills it with `value`."""
        handle = self.kit.handle(self.runtime, name, kind="persistent", **options)
        self.runtime.attach(handle, Number(self, value, name, scratch))
        return handle


class Number:
    """A source of one number, which looks as if it needed working memory."""

    def __init__(self, store: Store, value: float, name: str, scratch_nbytes: int) -> None:
        self.store, self.value, self.name, self.scratch_nbytes = store, value, name, scratch_nbytes

    def read(self, out: np.ndarray, scratch: memoryview) -> None:
        """Fill with the number, by way of the working memory."""
        assert len(scratch) == self.scratch_nbytes
        scratch[:] = b"\1" * len(scratch)
        self.store.read.append(self.name)
        if self.store.failure is not None:
            raise self.store.failure
        out.fill(self.value)


@pytest.fixture(params=["inline", "threads", "device", "disk"])
def runtime(request, tmp_path):  # type: ignore[no-untyped-def]
    """The oracle and the real one."""
    if request.param == "inline":
        yield InlineRuntime()
    else:
        machine = {"threads": {}, "device": {"sim_gpus": 1}, "disk": {"disk": (tmp_path, 1 << 20)}}[request.param]
        with Runtime(2, ram=1 << 20, **machine) as made:
            yield made
            made._executor.validate()


def test_what_is_asked_for_is_read(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """By a task that reads, one that updates, or the program."""
    store = Store(runtime, kit)
    a, b, c, d = (store.handle(number, name) for number, name in enumerate("abcd", 1))
    total = kit.filled(runtime, 0)
    assert isinstance(runtime, InlineRuntime) or store.read == []
    runtime.submit(kit.add, [(total, "RW"), (b, "R")])
    runtime.submit(kit.double, [(a, "RW")])
    assert kit.value(runtime, c) == 3
    runtime.submit(kit.add, [(total, "RW"), (a, "R")])
    assert kit.value(runtime, total) == 4
    assert kit.value(runtime, a) == 2
    if not isinstance(runtime, InlineRuntime):
        assert set(store.read) == {"a", "b", "c"}
        moved = runtime.stats()["moved_bytes"]
        assert sum(nbytes for link, nbytes in moved.items() if link.startswith("file->")) == 64 * len(store.read)
    del d
    gc.collect()


def test_overwriting_forgets_the_file(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """What would be overwritten is not read."""
    store = Store(runtime, kit)
    a, b = store.handle(1, "a"), store.handle(2, "b")
    read = list(store.read)
    runtime.submit(kit.fill, [(a, "W")], {"value": 5})
    with runtime.acquire(b, "W") as view:
        view.fill(7)
    assert (kit.value(runtime, a), kit.value(runtime, b), store.read) == (5, 7, read)


def test_sums_begin_with_what_the_file_holds(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """A contribution adds to it."""
    store = Store(runtime, kit)
    a, one = store.handle(3, "a"), kit.filled(runtime, 1)
    plus = Codelet("plus", cpu=lambda out, part, *, accumulate: out.__iadd__(part) if accumulate else out.__setitem__(..., part))
    runtime.submit(plus, [(a, "REDUX"), (one, "R")])
    assert (kit.value(runtime, a), store.read) == (4, ["a"])


def test_attaching_again_is_overwriting(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """Written data, lost data and other files give way to the file; data in use does not."""
    store = Store(runtime, kit)
    written, lost, other = kit.filled(runtime, 1), kit.handle(runtime), store.handle(3, "other")
    if isinstance(runtime, Runtime):
        runtime.submit(kit.fail, [(lost, "W")])
        with pytest.raises(TaskError):
            runtime.wait()
    for number, handle in enumerate((written, lost, other), 4):
        runtime.attach(handle, Number(store, number, "new", 0))
    assert [kit.value(runtime, handle) for handle in (written, lost, other)] == [4, 5, 6]
    if isinstance(runtime, Runtime):
        gate, go = kit.gate()
        runtime.submit(gate, [(other, "R")])
        with pytest.raises(ValueError, match="attach it before its first use"):
            runtime.attach(other, Number(store, 7, "late", 0))
        go()
        with runtime.record() as step:
            runtime.submit(kit.double, [(other, "RW")])
            with pytest.raises(RecordingError, match="attach it before"):
                runtime.attach(other, Number(store, 7, "late", 0))
        step.replay().wait()
        with pytest.raises(ValueError, match="attach it before its first use"):
            runtime.attach(other, Number(store, 7, "late", 0))


def test_a_step_reads_what_it_needs_when_it_is_wanted(kit) -> None:  # type: ignore[no-untyped-def]
    """Recording reads nothing; a replay neither what it overwrites nor what it does not touch, nor far ahead of the planned order."""
    with Runtime(1, ram=256 * PAGE) as runtime:
        store = Store(runtime, kit)
        files = [store.handle(number, str(number), count=COUNT) for number in range(200)]
        overwritten, untouched = store.handle(1, "overwritten"), store.handle(2, "untouched")
        total = kit.filled(runtime, 0, count=COUNT, kind="persistent")
        gate, go = kit.gate()
        with runtime.record() as step:
            runtime.submit(kit.fill, [(overwritten, "W")], {"value": 10})
            for at, handle in enumerate(files):
                if at == 20:
                    runtime.submit(gate, [(total, "RW")])
                runtime.submit(kit.add, [(total, "RW"), (handle, "R")])
        assert store.read == []
        ticket = step.replay()
        kit.value(runtime, files[19])
        assert len(store.read) <= 20 + TASKS
        go()
        ticket.wait()
        assert sorted(store.read, key=int) == [str(number) for number in range(200)]
        assert kit.value(runtime, total) == sum(range(200))
        assert [kit.value(runtime, handle) for handle in (overwritten, untouched)] == [10, 2]
        runtime._executor.validate()


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("devices", [0, 2])
def test_read_only_data_is_never_written_elsewhere(kit, tmp_path, disk, devices) -> None:  # type: ignore[no-untyped-def]
    """Four times as much as memory, with a disk tier and without: nothing but what is written goes down, and the last tier holds no more."""
    pages = 32
    with Runtime(2, ram=12 * PAGE, disk=(tmp_path, 64 * PAGE) if disk else None, sim_gpus=devices, gpu_memory=8 * PAGE) as runtime:
        store = Store(runtime, kit)
        files = [store.handle(number, str(number), count=COUNT) for number in range(pages)]
        total = kit.filled(runtime, 0, count=COUNT, kind="persistent")
        with runtime.record() as step:
            for handle in files:
                runtime.submit(kit.add, [(total, "RW"), (handle, "R")])
        assert step.plan.minimum_bytes(is_last=True, computes=not disk) <= 2 * PAGE
        for _ in range(3):
            step.replay().wait()
        assert kit.value(runtime, total) == 3 * sum(range(pages))
        stats = runtime.stats()
        assert all(stats["peak_bytes"][node] <= stats["budget_bytes"][node] for node in stats["peak_bytes"])
        assert sum(nbytes for link, nbytes in stats["moved_bytes"].items() if link.startswith("file->")) == PAGE * len(store.read) > pages * PAGE
        if disk:
            assert stats["peak_bytes"]["disk"] == PAGE
        runtime._executor.validate()


@pytest.mark.parametrize("disk", [False, True])
def test_what_is_written_gets_its_home_with_the_first_write(kit, tmp_path, disk) -> None:  # type: ignore[no-untyped-def]
    """A step that updates half of what it reads, at the smallest budgets that its plan asks for."""

    def run(ram: int, tier: int | None):  # type: ignore[no-untyped-def]
        with Runtime(2, ram=ram, disk=None if tier is None else (tmp_path, tier)) as runtime:
            store = Store(runtime, kit)
            frozen = [store.handle(number, f"frozen {number}", count=COUNT) for number in range(8)]
            trained = [store.handle(number, f"trained {number}", count=COUNT) for number in range(8)]
            with runtime.record() as step:
                for a, b in zip(frozen, trained, strict=True):
                    runtime.submit(kit.add, [(b, "RW"), (a, "R")])
            for _ in range(5):
                ticket = step.replay()
            ticket.wait()
            assert [kit.value(runtime, handle) for handle in trained] == [6 * number for number in range(8)]
            assert [kit.value(runtime, handle) for handle in frozen] == list(range(8))
            assert sum(name.startswith("trained") for name in store.read) == 8
            runtime._executor.validate()
            plan = step.plan
            return plan.minimum_bytes(is_last=not disk, computes=True), plan.minimum_bytes(is_last=True, computes=False), runtime.stats()

    ram, tier, _ = run(1 << 20, 1 << 20 if disk else None)
    assert (ram, tier) == (2 * PAGE if disk else 9 * PAGE, 9 * PAGE)
    _, _, stats = run(ram, 8 * PAGE if disk else None)
    if disk:
        assert stats["peak_bytes"]["disk"] == 8 * PAGE


def test_readers_memory_counts(kit) -> None:  # type: ignore[no-untyped-def]
    """Working memory of four readers is taken out of the budget with the first source that needs it; the plan of the step knows."""
    with Runtime(1, ram=10 * PAGE) as runtime:
        store = Store(runtime, kit)
        a = store.handle(1, "a", scratch=PAGE)
        assert runtime.stats()["resident_bytes"]["ram"] == 4 * PAGE
        assert runtime.stats()["budget_bytes"]["ram"] == 10 * PAGE
        store.handle(2, "b", scratch=100)
        assert runtime.stats()["peak_bytes_by_class"]["ram"]["scratch"] == 4 * PAGE
        assert kit.value(runtime, a) == 1
        with pytest.raises(DoesNotFit, match=r"takes 49,152 B of ram for its readers, but of its budget of 40,960 B"):
            store.handle(3, "c", scratch=3 * PAGE)
        runtime.submit(kit.fill, [(kit.handle(runtime, count=7 * COUNT), "W")], {"value": 1})
        with pytest.raises(DoesNotFit, match=r"fill needs 28,672 B .* of its budget of 40,960 B [\d,]+ B are taken"):
            runtime.wait()
        runtime._executor.validate()


def test_readers_find_the_room_that_there_is(kit) -> None:  # type: ignore[no-untyped-def]
    """Data that no program references any more, and what was read and can be read again, make room; what cannot be dropped is told, and stays."""
    with Runtime(1, ram=10 * PAGE) as runtime:
        store = Store(runtime, kit)
        forgotten = kit.filled(runtime, 1, "forgotten", 8 * COUNT)
        assert kit.value(runtime, forgotten) == 1
        del forgotten
        gc.collect()
        a = store.handle(2, "a", scratch=PAGE)
        kept = kit.filled(runtime, 3, "kept", 3 * COUNT)
        read = [store.handle(number, str(number), count=COUNT) for number in range(3)]
        assert [kit.value(runtime, handle) for handle in read] == [0, 1, 2]
        assert runtime.stats()["resident_bytes"]["ram"] == 10 * PAGE
        with pytest.raises(
            DoesNotFit, match=r"takes 32,768 B of ram for its readers, but of its budget of 40,960 B 40,960 B are taken; raise the"
        ) as refusal:
            store.handle(4, "large", scratch=2 * PAGE)
        lack = refusal.value.shortage
        assert (lack.cause, lack.node, lack.needed, lack.budget, lack.free) == ("readers", "ram", 8 * PAGE, 10 * PAGE, 0)
        store.handle(4, "b", scratch=PAGE + PAGE // 2)
        assert runtime._executor.machine.memory.used_by_class(RAM)["scratch"] == 6 * PAGE
        assert [kit.value(runtime, handle) for handle in (*read, a, kept)] == [0, 1, 2, 2, 3]
        runtime._executor.validate()


def test_a_recorded_step_that_has_not_run_may_be_given_its_data(kit) -> None:  # type: ignore[no-untyped-def]
    """Until its first replay; then the handle is the step's."""
    with Runtime(1, ram=1 << 20) as runtime:
        store = Store(runtime, kit)
        data, total = kit.filled(runtime, 1, kind="persistent"), kit.filled(runtime, 0, kind="persistent")
        with runtime.record() as step:
            runtime.submit(kit.add, [(total, "RW"), (data, "R")])
        runtime.attach(data, Number(store, 5, "new", 0))
        step.replay().wait()
        assert (kit.value(runtime, total), store.read) == (5, ["new"])
        with pytest.raises(ValueError, match="after a recorded step was replayed with it"):
            runtime.attach(data, Number(store, 6, "late", 0))


def test_data_is_fetched_while_a_task_waits_for_room() -> None:
    """What the task after it will read, into what is free beside the room it waits for."""
    driver = FakeDriver([400, 800], [("cpu", 0, 1), ("cpu", 0, 1)], storage=True)
    dirty = [driver.handle(130, f"dirty {number}") for number in range(3)]
    small, late, large = driver.handle(1, "small"), driver.handle(1, "late"), driver.handle(20, "large")
    for handle in (*dirty, small):
        driver.submit((handle, W))
    driver.attach(late)
    driver.drain()
    step = driver.record([[(small, RW)], [(large, W)], [(late, R), (small, RW)], *([(each, R), (small, RW)] for each in dirty)], {large: False})
    step.replay()
    assert [task.spec.name for task in driver.machine._dispatch.blocked[RAM]] == ["r1"]
    assert ("late", FILE, RAM) in driver.routes
    driver.drain()
    driver.check()


class Counting(Lookahead):
    """Counts how often it looks."""

    num_runs = 0

    def run(self, ended: Task | None, actions: list[Action], *, blocked: bool) -> None:
        """Look ahead."""
        self.num_runs += 1
        super().run(ended, actions, blocked=blocked)


def test_unread_data_that_no_step_uses_costs_nothing() -> None:
    """Looking ahead ends when all that the replays in flight use has been read; and without data in files nothing moves any more."""
    driver = FakeDriver([64], [("cpu", 0, 1)])
    unused, total, *used = (driver.handle(1, name) for name in ("unused", "total", "a", "b", "c"))
    for handle in (unused, *used):
        driver.attach(handle)
    driver.submit((total, W))
    driver.drain()
    step = driver.record([[(handle, R), (total, RW)] for handle in used * 10], {})
    lookahead = driver.machine._lookaheads.by_node[RAM] = Counting(driver.machine._replicas, RAM, is_only=True)
    for _ in range(3):
        step.replay()
        driver.drain()
    assert lookahead.num_runs == 1  # it starts reading all of it at once
    for handle in (*used, unused):
        driver.submit((handle, W))
    driver.drain()
    assert not driver.machine._replicas.has_several
    step.replay()
    driver.drain()
    driver.attach(late := driver.handle(1, "late"))
    driver.submit((late, R), (total, RW))
    driver.drain()
    driver.check()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_source_that_fails(kit, recorded) -> None:  # type: ignore[no-untyped-def]
    """Whoever needs the data is told, of a replay, a task and the program alike; the rest runs."""
    with Runtime(2, ram=1 << 20) as runtime:
        store = Store(runtime, kit)
        broken, fine = store.handle(1, "broken"), kit.filled(runtime, 3, kind="persistent")
        store.failure = OSError(5, "planted")
        total, other = kit.filled(runtime, 0, kind="persistent"), kit.filled(runtime, 0, kind="persistent")

        def emit() -> None:
            runtime.submit(kit.add, [(total, "RW"), (broken, "R")])
            runtime.submit(kit.add, [(other, "RW"), (fine, "R")])

        if recorded:
            with runtime.record() as step:
                emit()
            with pytest.raises(TaskError, match=r"needs handle 0 'broken' .* could not be read from its file: .*planted"):
                step.replay().wait()
        else:
            emit()
            with pytest.raises(TaskError, match=r"needs handle 0 'broken' .* could not be read from its file: .*planted") as told:
                runtime.wait()
            assert told.value.__cause__ is store.failure
        assert runtime.source_failure is store.failure
        assert runtime.tier_failure is None
        with pytest.raises(HandleLost, match="planted"):
            kit.value(runtime, broken)
        assert kit.value(runtime, other) == 3
        runtime.submit(kit.fill, [(broken, "W")], {"value": 8})
        assert kit.value(runtime, broken) == 8
        runtime._executor.validate()


def test_the_program_is_told_why(kit) -> None:  # type: ignore[no-untyped-def]
    """An acquisition that cannot have the data names the source's failure as its cause."""
    with Runtime(1, ram=1 << 20) as runtime:
        store = Store(runtime, kit)
        broken, store.failure = store.handle(1, "broken"), ZeroDivisionError("planted")
        with pytest.raises(HandleLost, match="planted") as told:
            kit.value(runtime, broken)
        assert told.value.__cause__ is store.failure


def test_reads_stand_in_the_trace(kit, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """As copies over a link of their own."""
    trace = Trace()
    with Runtime(1, ram=1 << 20, trace=trace) as runtime:
        store = Store(runtime, kit)
        kit.value(runtime, store.handle(1, "weight"))
        trace.write(tmp_path / "trace.json", runtime.worker_names, runtime.node_names)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2] == ["file->ram"]
    assert [event["args"]["bytes"] for event in events if event["ph"] == "X" and event["name"] == "weight"] == [64]


def test_closing_amid_reads(kit) -> None:  # type: ignore[no-untyped-def]
    """The read under way ends, those that nobody began are dropped, and no thread is left."""
    began, go = threading.Event(), threading.Event()

    class Slow:
        scratch_nbytes = 0

        def read(self, out: np.ndarray, scratch: memoryview) -> None:
            began.set()
            go.wait(DEADLINE)

    runtime = Runtime(1, ram=1 << 20)
    handles = [kit.handle(runtime, str(number)) for number in range(12)]
    for handle in handles:
        runtime.attach(handle, Slow())
    runtime.submit(kit.empty, [(handle, "R") for handle in handles])
    began.wait(DEADLINE)
    threading.Timer(0.05, go.set).start()
    runtime.close()
