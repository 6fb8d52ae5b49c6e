"""Codelets and data for a fake GPU that runs late."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from scheduler import Codelet, Handle, TaskRuntime
from scheduler.storage.device import DeviceMemory
from scheduler.testing import FakeGpu

COUNT = 512
"""Numbers in a piece of data: one page."""


class Place:
    """Numbers in a GPU's memory."""

    def __init__(self, address: int, count: int) -> None:
        self.address, self.nbytes = address, 8 * count

    def numbers(self) -> np.ndarray:
        memory = (ctypes.c_char * self.nbytes).from_address(self.address)
        return np.ndarray((self.nbytes // 8,), np.float64, buffer=memory)


class Numbers:
    """A view of `count` float64 numbers, wherever they are."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __call__(self, memory: Any, offset: int) -> Any:
        if isinstance(memory, DeviceMemory):
            return Place(memory.address + offset, self.count)
        return np.ndarray((self.count,), np.float64, buffer=memory, offset=offset)


_here = threading.local()


class Gpu(FakeGpu):
    """A fake GPU that kernels find by their thread."""

    def enter(self, stream: Any) -> None:
        super().enter(stream)
        _here.gpu = self


def both(name: str, compute: Any) -> Codelet:
    """A codelet that computes on the CPU at once, and on a GPU later."""

    def cuda(*places: Place, **constants: Any) -> None:
        _here.gpu.later(lambda: compute(*(place.numbers() for place in places), **constants))

    return Codelet(name, cpu=compute, cuda=cuda)


def _mix(out: np.ndarray, *inputs: np.ndarray, salt: int) -> None:
    total = out * 0.5 + salt
    for number, one in enumerate(inputs):
        count = min(len(total), len(one))
        total[:count] += one[:count][::-1] / (number + 3)
    out[...] = total


FILL = both("fill", lambda out, *, value: out.fill(value))

MIX = both("mix", _mix)

SPOIL = both("spoil", lambda out, partials: (partials.fill(np.nan), np.add(out, 1, out=out))[1])


def value(runtime: TaskRuntime, handle: Handle) -> float:
    """Sum of the numbers."""
    with runtime.acquire(handle, "R") as view:
        return float(view.sum())


def gpus(count: int, seed: int) -> list[Gpu]:
    """Of one node."""
    first = Gpu("fake:0", seed=seed)
    return [first, *(Gpu(f"fake:{number}", peer=first) for number in range(1, count))]
