"""Ctrl-C, SIGTERM and SIGHUP while training: the first signal requests an orderly end, the second ends the process at once.

The first signal only sets a flag. The training loop checks it between steps, lets the steps in flight finish, and saves. If the process ends before
that, a message names the newest checkpoint. Python runs handlers on the main thread, once that thread runs Python. The system may deliver a signal
to any thread, and the main thread may sleep indefinitely, so a second signal might never be handled. A thread of its own therefore reads the number
of every signal from a pipe.

One request may arrive as two signals: `timeout` signals its child and then the child's whole group. A repeat right after the first signal is
therefore ignored; a person's second Ctrl-C comes later. A terminal that closes sends SIGHUP, and so do its shell and the end of its session, so
SIGHUP is never a second signal, nor the next one after it. Under `nohup`, which ignores it, it stays ignored.
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

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request an end."""
REPETITION_SECONDS: Final = 0.5
"""Repeats of the first signal within this many seconds are ignored."""


class Interrupts:
    """Context manager that catches `SIGNALS`. It does nothing off the main thread, where Python allows no handlers.

    Attributes:
        signal: first signal that arrived; None for none.
        cut_short: whether a signal, or output that could not be written, ended the training before its last step.
        say_what_is_left: function that describes, for a run that ends too soon, how to continue.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.cut_short = False
        self._first: tuple[int, float] | None = None
        self.say_what_is_left: Callable[[], str] = lambda: "nothing was saved"
        self._undo = contextlib.ExitStack()

    @property
    def exit_code(self) -> int:
        """Exit code: 129 after SIGHUP, 130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
        return 128 + self.signal if self.signal is not None else 0

    def pending(self) -> bool:
        """Return whether a signal has arrived."""
        return self.signal is not None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            arrivals, written = os.pipe()
            os.set_blocking(written, False)  # required by signal.set_wakeup_fd
            threading.Thread(target=self._listen, args=(arrivals,), name="nntask signals", daemon=True).start()
            self._undo.callback(os.close, written)  # the thread then reads the end of the pipe, and ends
            self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(written, warn_on_full_buffer=False))
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._undo.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number

    def is_second(self, number: int, now: float) -> bool:
        """Count a signal that has arrived, and return whether it requests an immediate stop.

        Args:
            now: seconds of a monotonic clock.
        """
        if number == signal.SIGHUP:
            return False
        if self._first is None:
            self._first = (number, now)
            return False
        first, then = self._first
        return number != first or now - then >= REPETITION_SECONDS

    def _listen(self, arrivals: int) -> None:
        with open(arrivals, "rb", buffering=0) as pipe:
            while came := pipe.read(64):  # read all pending signals, so that those that arrive together have one time
                now = time.monotonic()
                for number in came:
                    if number in SIGNALS:
                        if self.is_second(number, now):
                            self._stop(number)
                        self._on_signal(number, None)

    def _stop(self, number: int) -> None:
        with contextlib.suppress(Exception):  # no error may keep the process from ending
            os.write(2, f"nntask: stopped at once; {self.say_what_is_left()}\n".encode())
        os._exit(128 + number)
