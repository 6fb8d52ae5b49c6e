"""Waits of the program for unfinished tasks: until all of them have ended, or until a submission has room."""

from __future__ import annotations

import threading
from typing import Final

from ..core.machine import Machine
from .waiting import Waiter, WaiterSet

WINDOW: Final = 8192
"""Number of unfinished plain tasks at which `submit` waits."""


class Backlog:
    """The threads that wait until few tasks are unfinished. To be read and changed under the executor's lock, except by `wait`.

    Args:
        machine: machine that counts unfinished tasks.
        lock: the executor's lock.
        waiters: waiters of the runtime.

    Attributes:
        reached: largest number of unfinished tasks at which one of the threads can go on; -1 without a thread.
    """

    __slots__ = ("_lock", "_machine", "_waiters", "_waiting", "reached")

    def __init__(self, machine: Machine, lock: threading.Lock, waiters: WaiterSet) -> None:
        self._machine, self._lock, self._waiters = machine, lock, waiters
        self._waiting: list[tuple[int, Waiter]] = []
        self.reached = -1

    def wait(self, target: int) -> None:
        """Wait until at most `target` tasks are unfinished."""
        waiter = self._waiters.enter()
        try:
            with self._lock:
                if self._machine.num_unfinished <= target:
                    return
                self._waiting.append((target, waiter))
                self.reached = max(self.reached, target)
            waiter.wait()
        finally:
            self._waiters.leave(waiter)

    def wake(self) -> None:
        """Wake the threads that can go on."""
        remaining = self._machine.num_unfinished
        for target, waiter in self._waiting:
            if remaining <= target:
                self._waiters.wake(waiter)
        self._waiting = [(target, waiter) for target, waiter in self._waiting if remaining > target]
        self.reached = max((target for target, _ in self._waiting), default=-1)
