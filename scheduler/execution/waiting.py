"""Sleeping until something happens, in a way that a broken runtime can end and in which signals are heard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

HEARD_SECONDS: Final = 0.2
"""How long a signal may go unheard."""


def sleep_until(event: threading.Event, meanwhile: Callable[[], object] | None = None) -> None:
    """Sleep until an event is set.

    Python runs handlers of signals on the main thread when that one runs Python: a signal that the system gives to another thread, or that comes just
    before the main one falls asleep, wakes no thread. So the sleeper looks up now and then.

    Args:
        meanwhile: called whenever the sleeper looks up.
    """
    while not event.wait(HEARD_SECONDS):
        if meanwhile is not None:
            meanwhile()


class Waiter:
    """Something a thread sleeps on until it happens, or until the runtime breaks.

    Attributes:
        error: why it will never happen.
        refusal: what happened was a refusal, and this is the reason.
    """

    __slots__ = ("_event", "error", "refusal")

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None
        self.refusal: BaseException | None = None

    def set(self) -> None:
        """It happened."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._event.is_set()

    def wait(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Sleep until it happened.

        Args:
            meanwhile: called now and then until it has.

        Raises:
            SchedulerError: the runtime broke.
        """
        sleep_until(self._event, meanwhile)
        if self.error is not None:
            raise self.error


class WaiterSet:
    """Every waiter that is not set yet, so that none is forgotten when the runtime breaks.

    Attributes:
        broken: why nothing will happen any more, if so.
    """

    __slots__ = ("_waiters", "broken")

    def __init__(self) -> None:
        self._waiters: set[Waiter] = set()
        self.broken: BaseException | None = None

    def enter(self) -> Waiter:
        """A new waiter.

        Raises:
            SchedulerError: the runtime is broken or closed.
        """
        waiter = Waiter()
        self._waiters.add(waiter)  # before looking, else a break in between would miss it
        if self.broken is not None:
            self._waiters.discard(waiter)
            raise self.broken
        return waiter

    def wake(self, waiter: Waiter) -> None:
        """It happened."""
        self._waiters.discard(waiter)
        waiter.set()

    def leave(self, waiter: Waiter) -> None:
        """No thread sleeps on the waiter any more."""
        self._waiters.discard(waiter)

    def close(self, error: BaseException) -> None:
        """Wake everybody with `error`, now and in future; the first error stays."""
        if self.broken is None:
            self.broken = error
        for waiter in list(self._waiters):
            waiter.error = self.broken
            self.wake(waiter)
