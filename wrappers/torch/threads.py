"""PyTorch's threads while sessions are open: so many for each worker, and for the program what it had once the last one is closed."""

from __future__ import annotations

import threading

import torch

from nntask import UsageError


class Threads:
    """Lets PyTorch compute with some threads from construction to `end`, or to the end of the last of several that overlap.

    Args:
        count: threads inside an operation, in every worker.

    Attributes:
        count: likewise.

    Raises:
        UsageError: sessions that are open have another number, which is one for the whole process.
    """

    _lock = threading.Lock()
    _num_open = 0
    _before = 1

    def __init__(self, count: int) -> None:
        cls = type(self)
        with cls._lock:
            if not cls._num_open:
                cls._before = torch.get_num_threads()
                torch.set_num_threads(count)
            elif torch.get_num_threads() != count:
                raise UsageError(
                    f"sessions that are open at once must have equal threads=, got {count} beside {torch.get_num_threads()}; close the other first"
                )
            cls._num_open += 1
        self.count = count
        self._is_open = True

    def end(self) -> None:
        """Give the program its threads back. Idempotent."""
        cls = type(self)
        with cls._lock:
            if self._is_open:
                self._is_open = False
                cls._num_open -= 1
                if not cls._num_open:
                    torch.set_num_threads(cls._before)
