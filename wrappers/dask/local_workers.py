"""How the worker processes of a local cluster live beside their client: what a terminal or a process group tells them is the client's to hear."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Threads that begin in here, and processes that these start at any time, never hear SIGINT and SIGTERM.

    A Ctrl-C in a terminal and a SIGTERM to a process group reach the workers, too, and are the client's, which lets the step end and saves. Dask ends
    workers with a message and then with SIGKILL, and they end by themselves when the client is gone.
    """
    with _quiet_tracker():
        resource_tracker.ensure_running()  # by whoever comes first; it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _quiet_tracker() -> Iterator[None]:
    """Python's tracker of semaphores, if it begins in here, removes those that a process which was stopped at once has left, and does not warn."""
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # it takes over the options of this interpreter
    try:
        yield
    finally:
        sys.warnoptions.pop()
