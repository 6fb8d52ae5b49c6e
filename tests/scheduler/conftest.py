"""What the scheduler's tests share: little float64 arrays as data, and a handful of codelets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.deadline import DEADLINE

from scheduler import Codelet, Handle, TaskRuntime


@dataclass(frozen=True)
class Numbers:
    """A view of `count` float64 numbers."""

    count: int

    def __call__(self, memory: Any, offset: int) -> np.ndarray:
        return np.ndarray((self.count,), np.float64, buffer=memory, offset=offset)


def _add(total: np.ndarray, part: np.ndarray) -> None:
    total += part


class Kit:
    """Codelets and handles for tests."""

    fill = Codelet("fill", cpu=lambda out, *, value: out.fill(value))
    add = Codelet("add", cpu=_add)
    plus = Codelet("plus", cpu=lambda a, b, out: np.add(a, b, out=out))
    double = Codelet("double", cpu=lambda a: np.multiply(a, 2, out=a))
    empty = Codelet("empty", cpu=lambda *views, **constants: None)

    @staticmethod
    def broken(*views: Any, **constants: Any) -> None:
        raise ZeroDivisionError("planted")

    fail = Codelet("fail", cpu=broken)

    @staticmethod
    def handle(runtime: TaskRuntime, name: str = "", count: int = 8, **options: Any) -> Handle:
        """A handle of `count` numbers."""
        return runtime.handle(8 * count, Numbers(count), name=name, combine=Kit.add, **options)

    @staticmethod
    def filled(runtime: TaskRuntime, value: float, name: str = "", count: int = 8, **options: Any) -> Handle:
        """A handle whose numbers are all `value`, written by the program."""
        handle = Kit.handle(runtime, name, count, **options)
        with runtime.acquire(handle, "W") as view:
            view.fill(value)
        return handle

    @staticmethod
    def value(runtime: TaskRuntime, handle: Handle) -> float:
        """The first number."""
        with runtime.acquire(handle, "R") as view:
            return float(view[0])

    @staticmethod
    def gate() -> tuple[Codelet, Callable[[], None]]:
        """A codelet that waits inside its kernel until the returned function is called."""
        opened = threading.Event()
        return Codelet("gate", cpu=lambda *views: opened.wait(DEADLINE)), opened.set


@pytest.fixture
def kit() -> Kit:
    """Codelets and handles for tests."""
    return Kit()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every runtime a test starts is gone when it ends."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith("nntask")]
    assert not left, f"threads left behind: {left}"
