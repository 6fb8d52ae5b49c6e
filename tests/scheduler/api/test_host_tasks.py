"""Tasks that need no worker: they begin when their data is there, any number at a time, and end when somebody says so."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest
from support.deadline import DEADLINE

from scheduler import RW, Codelet, Runtime, TaskError


class Gate:
    """A codelet whose tasks end when the test says so."""

    def __init__(self) -> None:
        self.begun: deque = deque()  # type: ignore[type-arg]
        self.more = threading.Semaphore(0)
        self.codelet = Codelet("gate", host=self._begin)

    def _begin(self, done, *views: np.ndarray, **constants: object) -> None:  # type: ignore[no-untyped-def]
        self.begun.append((done, views, constants))
        self.more.release()

    def wait(self, count: int) -> list:  # type: ignore[type-arg]
        """The next `count` tasks that have begun."""
        for _ in range(count):
            assert self.more.acquire(timeout=DEADLINE)
        return [self.begun.popleft() for _ in range(count)]


def test_they_occupy_no_worker_and_end_in_any_order(kit) -> None:  # type: ignore[no-untyped-def]
    """With one worker, three are under way at once while others compute; readers wait for just the one they read."""
    with Runtime(1, ram=1 << 20) as runtime:
        gate = Gate()
        handles = [kit.handle(runtime, f"h{i}") for i in range(3)]
        for handle in handles:
            runtime.submit(gate.codelet, [(handle, "W")], {"name": handle.name})
        begun = gate.wait(3)
        other = kit.filled(runtime, 3.0)
        runtime.submit(kit.double, [(other, "RW")])
        assert kit.value(runtime, other) == 6.0
        for done, views, constants in reversed(begun):
            views[0].fill(float(constants["name"][1:]))
            done(None)
        assert [kit.value(runtime, handle) for handle in handles] == [0.0, 1.0, 2.0]


def test_in_recorded_steps_two_replays_keep_apart(kit) -> None:  # type: ignore[no-untyped-def]
    """What a replay waits for is its own; data that outlives replays goes through them in order."""
    with Runtime(2, ram=1 << 20) as runtime:
        gate, state = Gate(), kit.filled(runtime, 1.0, "state", kind="persistent")
        with runtime.record() as step:
            arrived = kit.handle(runtime, "arrived")
            runtime.submit(gate.codelet, [(arrived, "W")])
            runtime.submit(kit.add, [(state, RW), (arrived, "R")])
        tickets = [step.replay(), step.replay()]
        first, second = gate.wait(2)
        for (done, views, _), value in ((second, 20.0), (first, 10.0)):
            views[0].fill(value)
            done(None)
        for ticket in tickets:
            ticket.wait()
        assert sorted(float(ticket.read(arrived)[0]) for ticket in tickets) == [10.0, 20.0]
        assert kit.value(runtime, state) == 31.0


def test_an_error_loses_what_they_should_have_written(kit) -> None:  # type: ignore[no-untyped-def]
    """Readers are cancelled with the story, as behind a kernel that raised."""
    runtime = Runtime(1, ram=1 << 20)
    gate, handle = Gate(), kit.handle(runtime, "lost")
    runtime.submit(gate.codelet, [(handle, "W")])
    runtime.submit(kit.double, [(handle, "RW")])
    ((done, _, _),) = gate.wait(1)
    done(OSError("unplugged"))
    with pytest.raises(TaskError, match="unplugged"):
        runtime.wait()
    runtime.close()


def test_closing_leaves_nobody_waiting(kit) -> None:  # type: ignore[no-untyped-def]
    """What ends after the runtime is closed is of no interest any more."""
    runtime = Runtime(1, ram=1 << 20)
    gate = Gate()
    runtime.submit(gate.codelet, [(kit.handle(runtime, "late"), "W")])
    ((done, _, _),) = gate.wait(1)
    runtime.close()
    done(None)


def test_memory_is_taken_when_they_begin_and_blocks_others(kit) -> None:  # type: ignore[no-untyped-def]
    """They hold their pages while they are under way: who finds no room waits for them, and is no failure."""
    with Runtime(1, ram=2 * 4096) as runtime:
        gate = Gate()
        runtime.submit(gate.codelet, [(kit.handle(runtime, "a"), "W"), (kit.handle(runtime, "b"), "W")])
        ((done, _, _),) = gate.wait(1)
        blocked = kit.handle(runtime, "c")
        runtime.submit(kit.fill, [(blocked, "W")], {"value": 5.0})
        assert runtime.stats()["resident_bytes"]["ram"] == 2 * 4096
        done(None)  # nobody refers to a and b any more
        assert kit.value(runtime, blocked) == 5.0
