"""Waiting for a result, in a way that a broken runtime ends and that lets Python handle signals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

HEARD_SECONDS: Final = 0.2
"""Longest delay of a signal handler, seconds."""


def sleep_until(event: threading.Event, meanwhile: Callable[[], object] | None = None) -> None:
    """Wait until an event is set.

    Python runs signal handlers on the main thread, and only while it executes Python code. A signal that the system delivers to another thread, or
    just before the main thread starts to wait, does not end the wait. So the wait is interrupted every `HEARD_SECONDS`.

    Args:
        meanwhile: function called at each interruption.
    """
    while not event.wait(HEARD_SECONDS):
        if meanwhile is not None:
            meanwhile()


class Waiter:
    """A result that one thread waits for; the wait also ends if the runtime breaks.

    Attributes:
        error: error of the runtime, if the result will never come.
        refusal: reason of a refusal, if the result is a refusal.
    """

    __slots__ = ("_event", "error", "refusal")

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None
        self.refusal: BaseException | None = None

    def set(self) -> None:
        """Announce that the result is there."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the result is there."""
        return self._event.is_set()

    def wait(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Wait for the result.

        Args:
            meanwhile: function that is called repeatedly while waiting.

        Raises:
            SchedulerError: the runtime broke or was closed.
        """
        sleep_until(self._event, meanwhile)
        if self.error is not None:
            raise self.error


class WaiterSet:
    """All waiters that are not set yet, so that a broken runtime wakes every one of them.

    Attributes:
        broken: error that ended the runtime; None while it works.
    """

    __slots__ = ("_waiters", "broken")

    def __init__(self) -> None:
        self._waiters: set[Waiter] = set()
        self.broken: BaseException | None = None

    def enter(self) -> Waiter:
        """Return a new waiter.

        Raises:
            SchedulerError: the runtime is broken or closed.
        """
        waiter = Waiter()
        self._waiters.add(waiter)  # before the check, else a break in between would miss it
        if self.broken is not None:
            self._waiters.discard(waiter)
            raise self.broken
        return waiter

    def wake(self, waiter: Waiter) -> None:
        """Announce that the waiter's result is there."""
        self._waiters.discard(waiter)
        waiter.set()

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter that no thread waits on any more."""
        self._waiters.discard(waiter)

    def close(self, error: BaseException) -> None:
        """Wake all present and future waiters with `error`; only the first error counts."""
        if self.broken is None:
            self.broken = error
        for waiter in list(self._waiters):
            waiter.error = self.broken
            self.wake(waiter)
