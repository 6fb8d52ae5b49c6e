"""Process-wide settings of PyTorch while sessions are open; closing the last session restores the program's own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from nntask import UsageError


class WhileOpen(ABC):
    """Settings that hold from construction to `end`, or until all overlapping objects of the same class have ended."""

    _lock: ClassVar[threading.Lock]
    _num_open: ClassVar[int]

    def __init_subclass__(cls) -> None:
        cls._lock, cls._num_open = threading.Lock(), 0

    def __init__(self) -> None:
        cls = type(self)
        with cls._lock:
            if cls._num_open:
                self._join()
            else:
                self._begin()
            cls._num_open += 1
        self._is_open = True

    def end(self) -> None:
        """Restore the program's settings. Idempotent."""
        cls = type(self)
        with cls._lock:
            if self._is_open:
                self._is_open = False
                cls._num_open -= 1
                if not cls._num_open:
                    cls._restore()

    @abstractmethod
    def _begin(self) -> None:
        """Save the program's settings, and set these."""

    @abstractmethod
    def _join(self) -> None:
        """Raise unless these settings equal those that hold already."""

    @classmethod
    @abstractmethod
    def _restore(cls) -> None:
        """Restore the program's settings."""


class Threads(WhileOpen):
    """The number of threads with which PyTorch computes.

    Args:
        count: number of threads inside an operation, in every worker.

    Attributes:
        count: number of threads inside an operation.

    Raises:
        UsageError: an open session has another number.
    """

    _before: ClassVar[int] = 1
    _held: ClassVar[tuple[int, int]] = (1, 0)
    _here: ClassVar[threading.local] = threading.local()

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__()

    @classmethod
    def hold(cls) -> None:
        """Set the calling thread to the number of threads that open sessions have, before it computes.

        OpenMP and MKL keep the number per thread, and `torch.set_num_threads` sets it for the calling thread. A new thread begins with the number of
        cores, until an operation of PyTorch itself reads the setting; a product before that sums in different pieces.
        """
        if getattr(cls._here, "held", None) != cls._held:
            torch.set_num_threads(cls._held[0])
            cls._here.held = cls._held

    @classmethod
    def leave(cls) -> None:
        """Give the calling thread its own number back, without a lock, before `end` runs in another thread; a worker takes it anew to compute."""
        if cls._num_open == 1:
            torch.set_num_threads(cls._before)
            cls._here.held = None

    def _begin(self) -> None:
        type(self)._before = torch.get_num_threads()
        type(self)._held = (self.count, type(self)._held[1] + 1)  # the counter renews each thread's setting, which the program may have changed
        torch.set_num_threads(self.count)

    def _join(self) -> None:
        if (held := type(self)._held[0]) != self.count:
            raise UsageError(f"sessions that are open at once must have equal threads=, got {self.count} and {held}", "close the other first")
        torch.set_num_threads(held)  # a thread that has dropped a session has its own number again

    @classmethod
    def _restore(cls) -> None:
        torch.set_num_threads(cls._before)
