"""Limits of the system on threads and open files, which Python raises as errors of its own."""

from __future__ import annotations

import errno

from ..errors import StorageError


def of_system_limit(error: BaseException) -> StorageError | None:
    """Return the user's error if a limit of the system is among the causes of an error; None for any other error.

    An error that was raised while another one was handled has that one as a cause, since a limit appears as the failure of whatever met it first.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        if isinstance(cause, RuntimeError) and str(cause) == "can't start new thread":
            fact = "the system starts no more threads for this process"
            return StorageError(fact, "raise its limit of processes (ulimit -u, or pids.max of its cgroup), or lower --ncpu")
        if isinstance(cause, OSError) and is_open_file_limit(cause):
            return StorageError("the system opens no more files for this process", "raise its limit of open files (ulimit -n)")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def is_open_file_limit(error: OSError) -> bool:
    """Return whether a file could not be opened because too many are open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
