"""A program that would wait for itself is told so, and nothing happens: it holds data, and asks for what waits for that data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.late_gpu import COUNT, FILL, MIX, Numbers, gpus, value
from support.plain_tasks import plain_task

from scheduler import Codelet, Deadlock, Handle, R, Runtime, Step, W
from scheduler.core.dependencies import link, predecessors, waiting_for
from scheduler.core.records import HandleId, HandleRecord, HandleSpec, Mode, Task

PAGE = 8 * COUNT
DEADLINE = 60.0


def begun(runtime: Runtime) -> tuple[Handle, Handle, Step, Handle]:
    """Two numbers that are kept, a step that changes the first of them, and an output of it that does not wait for either."""
    kept = [runtime.handle(PAGE, Numbers(), kind="persistent", name=name) for name in ("changed", "read")]
    for handle in kept:
        runtime.submit(FILL, [(handle, W)], {"value": 1.0})
    runtime.wait()
    with runtime.record() as step:
        runtime.submit(MIX, [(kept[0], "RW"), (kept[1], R)], {"salt": 1})
        out = runtime.handle(PAGE, Numbers(), name="out")
        runtime.submit(FILL, [(out, W)], {"value": 3.0})
    return kept[0], kept[1], step, out


def wait(runtime: Runtime, changed: Handle, step: Step) -> None:
    """For everything."""
    runtime.wait()


def write(runtime: Runtime, changed: Handle, step: Step) -> None:
    """For those that read."""
    with runtime.acquire(changed, "W") as view:
        view[:] = 5.0


def read_behind_a_writer(runtime: Runtime, changed: Handle, step: Step) -> None:
    """Which waits for those that read."""
    runtime.submit(FILL, [(changed, W)], {"value": 1.0})
    with runtime.acquire(changed, "R"):
        pass


def wait_for_a_ticket(runtime: Runtime, changed: Handle, step: Step) -> None:
    """Of a step that writes."""
    step.replay().wait()


def replay_thrice(runtime: Runtime, changed: Handle, step: Step) -> None:
    """The third waits for the first."""
    for _ in range(3):
        step.replay()


@pytest.mark.parametrize("ask", [wait, write, read_behind_a_writer, wait_for_a_ticket, replay_thrice])
def test_who_would_wait_for_itself_is_refused(ask: Callable[[Runtime, Handle, Step], None]) -> None:
    """Once the data has been given back, everything goes on, and nothing is lost."""
    with Runtime(2, ram=1 << 24) as runtime:
        changed, _, step, _ = begun(runtime)
        with runtime.acquire(changed, "R"), pytest.raises(Deadlock, match=r"waits for a task that waits for .*'changed'.* leave the block"):
            ask(runtime, changed, step)
        runtime.wait()
        step.replay().wait()
        value(runtime, changed)  # which raises where data is lost


def test_who_would_wait_for_a_turn_behind_itself_is_refused() -> None:
    """Tasks of kind host begin in their order, so the second one waits for the first, which waits for data that the thread holds."""
    host = Codelet("host", host=lambda done, *views: threading.Thread(target=done, args=(None,)).start())
    with Runtime(cpu_workers=2, ram=1 << 24) as runtime:
        changed = runtime.handle(PAGE, Numbers(), kind="persistent", name="changed")
        runtime.submit(FILL, [(changed, W)], {"value": 1.0})
        runtime.wait()
        with runtime.record() as step:
            runtime.submit(host, [(changed, W)])
            out = runtime.handle(PAGE, Numbers(), name="out")
            runtime.submit(host, [(out, W)])
        with runtime.acquire(changed, R):
            ticket = step.replay()
            with pytest.raises(Deadlock), ticket.borrow(out):
                pass
        ticket.wait()


def test_who_waits_for_other_data_is_not() -> None:
    """A hold of data that nothing else wants, or that is wanted by what nobody waits for here."""
    with Runtime(2, ram=1 << 24) as runtime:
        changed, read, step, out = begun(runtime)
        with runtime.acquire(read, "R"):
            step.replay().wait()
        with runtime.acquire(changed, "R"), step.replay().borrow(out) as view:
            assert view[0] == 3.0


def test_a_fused_step_is_refused_instead() -> None:
    """Its tasks are one on a GPU: what single tasks would give at once waits there for the data that is held."""
    with Runtime(0, gpus=gpus(1, 3), gpu_memory=512 * PAGE, ram=1024 * PAGE) as runtime:
        changed, _, step, out = begun(runtime)
        with runtime.acquire(changed, "R"):
            ticket = step.replay()
            with pytest.raises(Deadlock), ticket.borrow(out):
                pass
        assert ticket.read(out)[0] == 3.0


@pytest.mark.parametrize("is_shared", [False, True])
def test_another_thread_may_wait(is_shared: bool) -> None:
    """For the data that this one holds; and this one too, where another thread ends the hold."""
    with Runtime(2, ram=1 << 24) as runtime:
        changed, _, step, _ = begun(runtime)
        hold = runtime.acquire(changed, "R", is_shared=is_shared)
        hold.__enter__()
        ended: list[Any] = []

        def other() -> None:
            if is_shared:
                hold.__exit__(None, None, None)
            else:
                step.replay().wait()
            ended.append(True)

        thread = threading.Thread(target=other)
        thread.start()
        if is_shared:
            step.replay().wait()
        else:
            hold.__exit__(None, None, None)
        thread.join(DEADLINE)
        assert ended == [True]


def test_predecessors_are_those_that_edges_would_be_added_from() -> None:
    """Whatever has happened to a handle before."""
    handle = HandleRecord(HandleId(0), HandleSpec(PAGE, PAGE, None, "data", "persistent", "parameters"))
    modes: list[Mode] = ["W", "R", "R", "RW", "R", "W", "RW", "R", "SCRATCH", "R", "RW"]
    earlier: list[Task] = []
    for number, mode in enumerate(modes):
        task = plain_task(number, "task", ("cpu",), ((handle, mode),), order=number)
        foreseen = set(predecessors(task))
        link(task)
        assert foreseen == {each for each in earlier if task in each.successors}
        assert all(task in waiting_for(each) for each in foreseen)
        earlier.append(task)
