"""Ctrl-C and SIGTERM while training: the first asks for an orderly end, the second ends the process at once.

The handler only sets a flag; the training loop looks at it between steps, lets what is in flight finish and saves. Whoever does not wait for
that is told what there is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, catches SIGINT and SIGTERM. Does nothing off the main thread, where Python allows no handlers.

    Attributes:
        signal: the first that came.
        what_there_is: says, to whoever sent a second one, what can be continued.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.what_there_is: Callable[[], str] = lambda: "nothing was saved"
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM, 0 for neither."""
        return 128 + self.signal if self.signal is not None else 0

    def pending(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            with contextlib.suppress(Exception):  # nothing keeps the process from ending
                os.write(2, f"nntask: stopped at once; {self.what_there_is()}\n".encode())
            os._exit(128 + number)
        self.signal = number
