"""How kernels reach a device: which one computes for this thread, how a function of a source is started, and matrix products.

A source in ``source/`` is compiled once per element type (float, bf16) by whoever the device is: NVRTC for a GPU, a C++ compiler where a test runs
the same source on a CPU. Arguments travel as the driver's interface wants them, a list of addresses of values.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from ..registry import BF16
from .array import DeviceArray

SOURCES: Final = Path(__file__).parent / "source"
NAMES: Final = ("elementwise", "norm", "tables", "attention")
ELEMENTS: Final = {np.dtype(np.float32): "float", BF16: "bf16"}
THREADS: Final = 256
_MOST_BLOCKS: Final = 4096
ROOM_NBYTES: Final = 8 * _MOST_BLOCKS
"""Memory that a device lends to one kernel at a time, for the parts of a sum."""

Argument = DeviceArray | np.generic | None


class Device(Protocol):
    """What kernels need of a device; everything is ordered as it was started."""

    @property
    def room(self) -> DeviceArray:
        """`ROOM_NBYTES` of memory for one kernel at a time."""

    def start(self, source: str, element: str, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Any) -> None:
        """Start a kernel.

        Args:
            source: one of `NAMES`.
            element: one of the values of `ELEMENTS`.
            grid: blocks along each axis.
            threads: of a block.
            shared: bytes of shared memory of a block; above 48 KiB the kernel has to be allowed so much before it starts.
            arguments: array of addresses of the values.
        """

    def gemm(
        self,
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        *,
        trans_a: bool,
        trans_b: bool,
        alpha: float,
        accumulate: bool,
        stride_a: int | None = None,
    ) -> None:
        """out (+)= alpha * op(a) @ op(b), sums in fp32; `stride_a` elements lie between the beginnings of rows of `a`, if not its width."""


_current = threading.local()


def use(device: Device) -> None:
    """Let kernels that this thread runs compute on `device`."""
    _current.device = device


def device() -> Device:
    """The device of this thread.

    Raises:
        AttributeError: `use` has not been called in it.
    """
    found: Device = _current.device
    return found


class Source:
    """Kernels of one file.

    Args:
        name: one of `NAMES`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def start(
        self,
        kernel: str,
        element: np.dtype[Any],
        *arguments: Argument,
        grid: tuple[int, int, int],
        threads: int = THREADS,
        shared: int = 0,
    ) -> None:
        """Start a kernel for elements of that type."""
        kept = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(kept))(*(value.ctypes.data for value in kept))
        device().start(self.name, ELEMENTS[element], kernel, grid, threads, shared, addresses)

    def each(self, kernel: str, element: np.dtype[Any], count: int, *arguments: Argument) -> None:
        """Start a kernel that goes over `count` numbers, its last argument."""
        blocks = min(_MOST_BLOCKS, -(-count // THREADS))
        if blocks:
            self.start(kernel, element, *arguments, np.int64(count), grid=(blocks, 1, 1))

    def by_row(self, kernel: str, x: DeviceArray, *arguments: Argument, numbers: int = 1) -> None:
        """Start a kernel with a block for each row of `x`, which has as many numbers of shared memory per thread."""
        threads = threads_for(x.shape[-1])
        self.start(kernel, x.dtype, *arguments, grid=(x.size // x.shape[-1], 1, 1), threads=threads, shared=4 * threads * numbers)

    def by_column(self, kernel: str, x: DeviceArray, *arguments: Argument, numbers: int = 1) -> None:
        """Start a kernel with 256 threads for each 32 columns of `x`."""
        self.start(kernel, x.dtype, *arguments, grid=(-(-x.shape[-1] // 32), 1, 1), shared=4 * 256 * numbers)


def threads_for(width: int) -> int:
    """A power of two of threads, from 32 to 1024, for a row of so many numbers."""
    threads = 32
    while threads < min(1024, width // 2):
        threads *= 2
    return threads


def _value(argument: Argument) -> np.ndarray[Any, Any]:
    """The bytes of one argument."""
    if isinstance(argument, DeviceArray):
        return np.array(argument.address, np.uint64)
    return np.array(0 if argument is None else argument, None if argument is not None else np.uint64)
