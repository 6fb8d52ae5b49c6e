"""Settings of PyTorch that are one for the process, while sessions are open; for the program what they were once the last one is closed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from nntask import UsageError


class WhileOpen(ABC):
    """Settings that hold from construction to `end`, or to the end of the last of several of the same class that overlap."""

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
        """Give the program its settings back. Idempotent."""
        cls = type(self)
        with cls._lock:
            if self._is_open:
                self._is_open = False
                cls._num_open -= 1
                if not cls._num_open:
                    cls._restore()

    @abstractmethod
    def _begin(self) -> None:
        """Note the program's settings, and set these."""

    @abstractmethod
    def _join(self) -> None:
        """Refuse to overlap with those that hold, if these are others."""

    @classmethod
    @abstractmethod
    def _restore(cls) -> None:
        """Set the program's again."""


class Threads(WhileOpen):
    """Lets PyTorch compute with some threads.

    Args:
        count: threads inside an operation, in every worker.

    Attributes:
        count: likewise.

    Raises:
        UsageError: sessions that are open have another number.
    """

    _before: ClassVar[int] = 1
    _held: ClassVar[tuple[int, int]] = (1, 0)
    _here: ClassVar[threading.local] = threading.local()

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__()

    @classmethod
    def hold(cls) -> None:
        """Give the calling thread the number that open sessions have, before it computes.

        The number is each thread's own, in OpenMP and in MKL: `torch.set_num_threads` sets that of the caller. A new thread begins with as many as
        there are cores, until an operation of PyTorch itself asks for the number, and a product before that sums in other pieces.
        """
        if getattr(cls._here, "held", None) != cls._held:
            torch.set_num_threads(cls._held[0])
            cls._here.held = cls._held

    def _begin(self) -> None:
        type(self)._before = torch.get_num_threads()
        type(self)._held = (self.count, type(self)._held[1] + 1)  # a number of its own: the program may have set another one in between
        torch.set_num_threads(self.count)

    def _join(self) -> None:
        if torch.get_num_threads() != self.count:
            raise UsageError(
                f"sessions that are open at once must have equal threads=, got {self.count} beside {torch.get_num_threads()}; close the other first"
            )

    @classmethod
    def _restore(cls) -> None:
        torch.set_num_threads(cls._before)
