"""`Runtime.on_task`: what it shows of finished tasks, and how what it raises stops the run."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.deadline import DEADLINE

from scheduler import REDUX, RW, SCRATCH, Codelet, FinishedTask, R, RunStopped, Runtime, SchedulerError, TaskError, W
from scheduler.drivers.callbacks import Watch
from scheduler.execution.waiting import Waiter

MIB = 1 << 20


class Enough(Exception):
    """What a callback raises."""


def test_a_callback_sees_finished_tasks_with_their_data(kit: Any) -> None:
    """Name, worker, node, times and the data a kernel left; scratch and tasks that failed are not shown, nor what ran before and after."""
    seen: list[tuple[FinishedTask, list[float]]] = []
    with Runtime(1, ram=MIB) as runtime:
        data, other, scratch = kit.filled(runtime, 2, "data"), kit.handle(runtime, "other"), kit.handle(runtime, "scratch")
        runtime.submit(kit.double, [(data, RW)])
        runtime.wait()
        assert runtime.on_task(lambda task: seen.append((task, [float(tile.data[0]) for tile in task.tiles]))) is not None
        runtime.submit(kit.double, [(data, RW)])
        runtime.submit(kit.empty, [(data, R), (scratch, SCRATCH)])
        runtime.submit(kit.fail, [(other, W)])
        with pytest.raises(TaskError):
            runtime.wait()
        runtime.on_task(None)
        runtime.submit(kit.double, [(data, RW)])
    first, second = (task for task, _ in seen)
    assert [values for _, values in seen] == [[8.0], [8.0]]
    assert (first.name, first.worker, first.node, first.replay) == ("double", "cpu:0", "ram", None)
    assert [(tile.name, tile.mode, tile.nbytes) for tile in first.tiles] == [("data", "RW", 64)]
    assert [(tile.name, tile.mode) for tile in second.tiles] == [("data", "R")]
    assert first.start_ns < first.end_ns <= second.start_ns
    assert second.number == first.number + 1


def test_views_are_read_only(kit: Any) -> None:
    """A callback cannot change data, on a device neither; trying stops the run like any other error."""

    def write(task: FinishedTask) -> None:
        task.tiles[0].data[...] = 0

    with Runtime(0, sim_gpus=1, ram=MIB) as runtime:
        data = kit.filled(runtime, 2, "data")
        runtime.on_task(write)
        runtime.submit(kit.double, [(data, RW)])
        with pytest.raises(RunStopped, match=r"stopped the run at task \d+ double\(RW data\) on sim:0: ValueError: .*read-only"):
            runtime.wait()
        assert kit.value(runtime, data) == 4


def test_tasks_of_recorded_steps_say_their_replay(kit: Any) -> None:
    """Each replay by its number."""
    seen: list[tuple[str, int | None]] = []
    with Runtime(2, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, kind="persistent")
        with runtime.record() as step:
            runtime.submit(kit.double, [(data, RW)])
        runtime.on_task(lambda task: seen.append((task.name, task.replay)))
        tickets = [step.replay() for _ in range(3)]
        tickets[-1].wait()
    assert seen == [("double", 0), ("double", 1), ("double", 2)]


def test_a_stop_leaves_data_whole(kit: Any) -> None:
    """What was submitted runs, later tasks and replays are refused, data is read and saved; another callback lets the runtime go on."""
    gate, opened = kit.gate()
    shown = threading.Event()

    def stop(task: FinishedTask) -> None:
        shown.set()
        raise Enough(task.name)

    with Runtime(1, ram=MIB, lanes=2) as runtime:
        total, data = kit.handle(runtime, "total"), kit.filled(runtime, 1, "data", kind="persistent")
        with runtime.record() as step:
            runtime.submit(kit.double, [(data, RW)])
        runtime.submit(gate, [(kit.handle(runtime), W)])
        for part in (1.0, 2.0):
            runtime.submit(SUM, [(total, REDUX)], {"value": part})
        ticket = step.replay()
        runtime.on_task(stop)
        opened()
        assert shown.wait(DEADLINE)
        ticket.wait()
        assert ticket.read(data)[0] == 2
        for attempt in (lambda: runtime.submit(kit.double, [(data, RW)]), step.replay):
            with pytest.raises(RunStopped, match="Enough: gate") as told:
                attempt()
            assert isinstance(told.value.__cause__, Enough)
        assert kit.value(runtime, total) == 3  # summed after the stop
        runtime.wait()  # told already
        runtime.on_task(None)
        step.replay().wait()
        assert kit.value(runtime, data) == 4


SUM = Codelet("sum", cpu=lambda total, *, value, accumulate: np.add(total if accumulate else 0, value, out=total))


def test_a_stop_nobody_heard_of_is_told_at_the_end(kit: Any) -> None:
    """Leaving the block waits, and raises; of two callbacks that raise, one is told."""
    with pytest.raises(RunStopped), Runtime(2, ram=MIB) as runtime:  # noqa: PT012
        runtime.on_task(lambda task: [][0])
        for _ in range(8):
            runtime.submit(kit.fill, [(kit.handle(runtime), W)], {"value": 1.0})


def test_a_program_that_submits_forever_is_stopped(kit: Any) -> None:
    """The loop ends with the callback's error, and every task that was taken has run."""

    def stop_at_ten(task: FinishedTask) -> None:
        if task.tiles[0].data[0] == 10:
            raise Enough

    taken: list[int] = []
    one = Codelet("one", cpu=lambda a: np.add(a, 1, out=a))
    with Runtime(2, ram=MIB) as runtime:
        data = kit.filled(runtime, 0, "data")
        runtime.on_task(stop_at_ten)

        def submit_forever() -> None:
            while True:
                runtime.submit(one, [(data, RW)])
                taken.append(1)

        with pytest.raises(RunStopped):
            submit_forever()
        assert kit.value(runtime, data) == len(taken) >= 10


@pytest.mark.parametrize("call", ["wait", "acquire", "submit", "replay", "ticket", "close"])
def test_a_callback_that_calls_back_stops_the_run(kit: Any, call: str) -> None:
    """It would wait for its own worker; the refusal says so, the program is told, and everything has run."""
    with Runtime(2, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, "data", kind="persistent")
        with runtime.record() as step:
            runtime.submit(kit.double, [(data, RW)])
        ticket = step.replay()
        ticket.wait()
        calls = {
            "wait": runtime.wait,
            "acquire": lambda: kit.value(runtime, data),
            "submit": lambda: runtime.submit(kit.double, [(data, RW)]),
            "replay": step.replay,
            "ticket": ticket.wait,
            "close": runtime.close,
        }
        runtime.on_task(lambda task: calls[call]())
        runtime.submit(kit.double, [(data, RW)])
        with pytest.raises(RunStopped, match=r"was called inside a callback of on_task, .* raise to stop the run") as told:
            runtime.wait()
        assert isinstance(told.value.__cause__, SchedulerError)
        assert kit.value(runtime, data) == 4


def test_a_new_callback_is_not_stopped_by_the_old_one() -> None:
    """The old one may raise while the new one is set: the stop ends and the callback changes at once for whoever looks under the lock."""
    held: list[bool] = []

    class Noting(Watch):
        def __setattr__(self, name: str, value: object) -> None:
            if name in ("callback", "stop") and hasattr(self, "_lock"):
                held.append(self._lock.locked())
            super().__setattr__(name, value)

    watch = Noting()
    watch.begin(lambda task: None)
    assert held == [True, True]


def test_a_replay_that_waited_looks_for_a_stop_again(kit: Any) -> None:
    """The third waits for the first, whose task asks for the end meanwhile: it is not started."""
    gate, opened = kit.gate()

    def stop(task: FinishedTask) -> None:
        raise Enough

    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, "data", kind="persistent")
        with runtime.record() as step:
            runtime.submit(gate, [(data, RW)])
        tickets = [step.replay(), step.replay()]
        runtime.on_task(stop)
        waiter = tickets[0].done

        class Opening(Waiter):
            def wait(self) -> None:
                opened()
                waiter.wait()

        step._waiters[0] = Opening()
        with pytest.raises(RunStopped, match="stopped the run at"):
            step.replay()
        tickets[1].wait()
