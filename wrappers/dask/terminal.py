"""What workers of a local cluster load first: a Ctrl-C in the terminal reaches them, too, and is the client's, which lets the step end and saves."""

from __future__ import annotations

import signal


def dask_setup(worker: object) -> None:
    """Called by Dask in the worker's process, on its main thread, before it joins the cluster."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
