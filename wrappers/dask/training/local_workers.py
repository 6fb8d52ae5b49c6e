"""Signal masks of the worker processes of a local cluster: signals of a terminal or a process group are for their client alone."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker

from nntask.training import SIGNALS


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block the signals that end a training, within this context, for threads started in it and for the processes that these threads ever start.

    A Ctrl-C in a terminal, its end, and a SIGTERM to a process group reach the workers, too, but are meant for the client, which completes the step
    and saves. Dask ends workers by a message and then by SIGKILL, and workers end by themselves when the client is gone."""
    with _quiet_tracker():
        resource_tracker.ensure_running()  # started here, because its start in the block would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _quiet_tracker() -> Iterator[None]:
    """Let Python's resource tracker, if it starts in this block, remove semaphores of killed processes without a warning."""
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # the tracker inherits the options of this interpreter
    try:
        yield
    finally:
        sys.warnoptions.pop()
