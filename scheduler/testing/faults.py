"""Faults for tests to plant in a real runtime."""

from __future__ import annotations

from ..execution.trace import Accesses, Trace


class FatalTrace(Trace):
    """A trace that raises in the thread that reports to it, outside any kernel, so that this thread of the runtime dies.

    Args:
        error: exception to raise.
        copies: whether copies raise it; otherwise tasks do.

    Attributes:
        armed: whether it raises at present.
    """

    def __init__(self, error: BaseException, *, copies: bool) -> None:
        super().__init__()
        self.error = error
        self.copies = copies
        self.armed = False

    def add_task(self, worker: int, name: str, task: int, start_ns: int, end_ns: int, node: int, accesses: Accesses) -> None:
        """Raise the error if it is planted in tasks."""
        if self.armed and not self.copies:
            raise self.error

    def add_copy(self, source: int, target: int, name: str, nbytes: int, start_ns: int, end_ns: int, handle: int) -> None:
        """Raise the error if it is planted in copies."""
        if self.armed and self.copies:
            raise self.error
