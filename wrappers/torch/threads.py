"""Settings of PyTorch that hold for the whole process while sessions are open, such as one thread for each worker; afterwards the program's again."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class ProcessTerms(ABC):
    """Settings that hold from construction to `end`, or to the end of the last of several that overlap."""

    _lock: ClassVar = threading.Lock()
    _num_open: ClassVar[int] = 0

    def __init__(self) -> None:
        self._is_open = True
        cls = type(self)
        with cls._lock:
            if not cls._num_open:
                cls._begin()
            cls._num_open += 1

    def end(self) -> None:
        """Give the program its own settings back. Idempotent."""
        cls = type(self)
        with cls._lock:
            if self._is_open:
                self._is_open = False
                cls._num_open -= 1
                if not cls._num_open:
                    cls._restore()

    @classmethod
    @abstractmethod
    def _begin(cls) -> None:
        """Note the program's settings, and set ours."""

    @classmethod
    @abstractmethod
    def _restore(cls) -> None:
        """Set the program's again."""


class SingleThread(ProcessTerms):
    """Lets PyTorch compute with one thread."""

    _before: ClassVar[int] = 1

    @classmethod
    def _begin(cls) -> None:
        cls._before = torch.get_num_threads()
        torch.set_num_threads(1)

    @classmethod
    def _restore(cls) -> None:
        torch.set_num_threads(cls._before)
