"""Ctrl-C and SIGTERM while training: the first asks for an orderly end, the second ends the process at once.

The first only sets a flag; the training loop looks at it between steps, lets what is in flight finish and saves. If the process is ended before that,
a message names what is left.

Python runs handlers on the main thread, once that thread runs Python. The system may give a signal to any thread, and the main one may sleep
without limit: a second signal would then never be heard. So a thread of its own reads, from a pipe, the number of every signal that arrives.

One wish may arrive as two signals: `timeout` signals its child and then the child's whole group. So a repetition right after the first counts as
the first; a person's second Ctrl-C comes later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
REPETITION_SECONDS: Final = 0.5
"""The same signal again within this time of the first is the first."""


class Interrupts:
    """While entered, catches SIGINT and SIGTERM. Does nothing off the main thread, where Python allows no handlers.

    Attributes:
        signal: the first that came.
        say_what_is_left: says, when a second signal ends the process, what can be continued.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._first: tuple[int, float] | None = None
        self.say_what_is_left: Callable[[], str] = lambda: "nothing was saved"
        self._undo = contextlib.ExitStack()

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM, 0 for neither."""
        return 128 + self.signal if self.signal is not None else 0

    def pending(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            arrivals, written = os.pipe()
            os.set_blocking(written, False)  # or signal.set_wakeup_fd refuses it
            threading.Thread(target=self._listen, args=(arrivals,), name="nntask signals", daemon=True).start()
            self._undo.callback(os.close, written)  # the thread reads the end, and ends
            self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(written, warn_on_full_buffer=False))
            for number in _SIGNALS:
                self._undo.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number

    def is_second(self, number: int, now: float) -> bool:
        """Count a signal that has arrived; whether it is a wish to stop at once.

        Args:
            now: seconds on any clock that never goes back.
        """
        if self._first is None:
            self._first = (number, now)
            return False
        first, then = self._first
        return number != first or now - then >= REPETITION_SECONDS

    def _listen(self, arrivals: int) -> None:
        with open(arrivals, "rb", buffering=0) as pipe:
            while came := pipe.read(64):  # all that are there, so that what arrives together has one time
                now = time.monotonic()
                for number in came:
                    if number in _SIGNALS:
                        if self.is_second(number, now):
                            self._stop(number)
                        self._on_signal(number, None)

    def _stop(self, number: int) -> None:
        with contextlib.suppress(Exception):  # nothing keeps the process from ending
            os.write(2, f"nntask: stopped at once; {self.say_what_is_left()}\n".encode())
        os._exit(128 + number)
