"""PyTorch's threads while sessions are open: one for each worker, and for the program what it had once the last one is closed."""

from __future__ import annotations

import threading

import torch


class SingleThread:
    """Lets PyTorch compute with one thread from construction to `end`, or to the end of the last of several that overlap."""

    _lock = threading.Lock()
    _num_open = 0
    _before = 1

    def __init__(self) -> None:
        self._is_open = True
        cls = type(self)
        with cls._lock:
            if not cls._num_open:
                cls._before = torch.get_num_threads()
                torch.set_num_threads(1)
            cls._num_open += 1

    def end(self) -> None:
        """Give the program its threads back. Idempotent."""
        cls = type(self)
        with cls._lock:
            if self._is_open:
                self._is_open = False
                cls._num_open -= 1
                if not cls._num_open:
                    torch.set_num_threads(cls._before)
