"""The watchdog: a report on standard error if no task ends for a while. A runtime has one only if it is asked for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from math import inf
from time import perf_counter
from typing import Final, Protocol

VARIABLE: Final = "NNTASK_WATCHDOG"
"""Environment variable with the seconds after which the watchdog reports; unset or empty for no watchdog."""

LOOKS: Final = 4
"""Number of looks at the counts of tasks in that time; the report comes at most one look late."""


class Watched(Protocol):
    """The part of the executor that a watchdog uses."""

    def progress(self) -> tuple[int, int]:
        """Return the number of tasks that have ended, and of those that should end."""

    def standstill(self) -> str:
        """Return which tasks run, which wait, and why."""


class Patience:
    """The decision to report a standstill, once for each; time is an argument.

    Args:
        seconds: time without an ended task after which a standstill is reported.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._num_ended = 0
        self._since: float | None = None
        self._is_reported = False

    def is_over(self, now: float, num_ended: int, num_unfinished: int) -> bool:
        """Whether to report now that `num_ended` tasks have ended and `num_unfinished` have not."""
        if num_ended != self._num_ended or num_unfinished <= 0:
            self._num_ended, self._since, self._is_reported = num_ended, None, False
        if num_unfinished > 0 and self._since is None:
            self._since = now
        if self._since is None or self._is_reported or now - self._since < self._seconds:
            return False
        self._is_reported = True
        return True


class Watchdog(threading.Thread):
    """The thread that looks at the counts of tasks.

    Args:
        watched: executor whose tasks should end.
        seconds: time without an ended task after which the watchdog reports.
    """

    def __init__(self, watched: Watched, seconds: float) -> None:
        super().__init__(name="nntask watchdog", daemon=True)
        self._watched, self._seconds = watched, seconds
        self._closed = threading.Event()

    def run(self) -> None:
        """Look until `close`."""
        patience = Patience(self._seconds)
        while not self._closed.wait(self._seconds / LOOKS):
            if patience.is_over(perf_counter(), *self._watched.progress()):
                print(f"nntask: no task has ended for {self._seconds:g} s; {self._watched.standstill()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self.is_alive():
            self.join()


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return the seconds that the environment gives the watchdog; None if it asks for none.

    Raises:
        ValueError: the variable is not a positive number.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < inf:
        raise ValueError(f"{VARIABLE} must be a positive number of seconds, got {text!r}; set it to one, such as 60, or unset it")
    return seconds
