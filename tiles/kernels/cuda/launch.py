"""Launching of kernels: the device of the calling thread, the functions of a source, and matrix products.

The device compiles a source in ``source/`` once per element type (float, bf16): with NVRTC for a GPU, or with a C++ compiler in tests that run
the same source on a CPU. Arguments are passed in the form that the driver expects, a list of addresses of values.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from ..registry import BF16
from .array import DeviceArray
from .library_attention import WholeShape

SOURCES: Final = Path(__file__).parent / "source"
NAMES: Final = (
    "elementwise", "norm", "tables", "attention", "cache", "quantised", "updates", "flash", "flash_dropout", "flash_options", "pages", "experts",
)  # fmt: skip
ELEMENTS: Final = {np.dtype(np.float32): "float", BF16: "bf16"}
THREADS: Final = 256
_ROW_THREADS: Final = 132 * 1024
"""Number of threads for all rows of an array beyond which a row has a warp: half of those that an H100 can hold."""
MOST_BLOCKS: Final = 65536
MOST_BLOCKS_ASIDE: Final = 65535
"""Largest number of blocks along the second and the third axis of a grid (CUDA C++ Programming Guide, technical specifications)."""
PARTIALS_NBYTES: Final = 10 << 20
"""Memory of a device for the partial sums of one kernel at a time: 8 bytes for each of 1024 blocks of 64 tiles, or three sums of columns for each
lane of all pieces of an array's rows."""
ARRIVALS_NBYTES: Final = 1 << 19
"""Memory of a device for counters of blocks: 4 bytes for each group of columns, or for each block of a launch over several tiles."""

Argument = DeviceArray | np.generic | None
Product = tuple[DeviceArray, DeviceArray, DeviceArray]
"""The matrices of a product: a, b and out."""


class Arguments:
    """Values of one kernel's arguments, packed for its launch: an array of addresses of slots of 8 bytes or more.

    A kernel's arguments have the same types at every launch, so the layout is reused with new values.

    Attributes:
        address: address of the array of addresses.
    """

    def __init__(self, arguments: Sequence[Argument]) -> None:
        formats = [_format(argument) for argument in arguments]
        self._struct = struct.Struct("<" + "".join(formats))
        self._is_struct = [text.endswith("s") for text in formats]
        self._memory = ctypes.create_string_buffer(self._struct.size)
        offsets = (struct.calcsize("<" + "".join(formats[:number])) for number in range(len(formats)))
        base = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_uint64 * len(formats))(*(base + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)

    def fill(self, arguments: Sequence[Argument]) -> None:
        """Write values into the slots."""
        values: list[Any] = []
        for argument, is_struct in zip(arguments, self._is_struct, strict=True):
            if type(argument) is DeviceArray:
                values.append(argument.address)
            elif argument is None:
                values.append(0)
            else:
                values.append(argument.tobytes() if is_struct else argument.item())  # type: ignore[union-attr]
        self._struct.pack_into(self._memory, 0, *values)

    def copy(self) -> Arguments:
        """Return the same values in memory of their own."""
        other = copy(self)
        other._memory = ctypes.create_string_buffer(self._memory.raw, self._struct.size)
        shift = ctypes.addressof(other._memory) - ctypes.addressof(self._memory)
        other._pointers = (ctypes.c_uint64 * len(self._pointers))(*(pointer + shift for pointer in self._pointers))
        other.address = ctypes.addressof(other._pointers)
        return other


class StreamPointer(NamedTuple):
    """A device's stream in the form that another library needs.

    Args:
        name: name of the device, in messages.
        card: CUDA's index of the card; None if the device is emulated in host memory, where each kernel has ended when its launch returns.
        pointer: the stream, a cudaStream_t; 0 if there is none.
    """

    name: str
    card: int | None
    pointer: int


class Device(Protocol):
    """The interface that kernels need of a device, which executes in the order of launches."""

    @property
    def partials(self) -> DeviceArray:
        """Memory of `PARTIALS_NBYTES` for one kernel at a time."""

    @property
    def arrivals(self) -> DeviceArray:
        """Memory of `ARRIVALS_NBYTES` that is 0 before and after each kernel."""

    def start(self, source: str, element: str, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Arguments) -> None:
        """Start a kernel.

        Args:
            source: one of `NAMES`.
            element: one of the values of `ELEMENTS`.
            grid: blocks along each axis.
            threads: number of threads in a block.
            shared: bytes of shared memory of a block; above 48 KiB the kernel must get permission before the launch.
            arguments: values, which may be overwritten as soon as this returns.
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
        stride_out: int | None = None,
    ) -> None:
        """out (+)= alpha * op(a) @ op(b), sums in fp32; the strides are the distances of rows of `a` and `out` in elements, None for their widths."""

    def gemms(self, products: Sequence[Product], *, trans_a: bool, trans_b: bool, accumulate: bool) -> None:
        """out (+)= op(a) @ op(b) for several products of one shape and type, in one launch if the library has it."""

    def gemm_with_bias(self, a: DeviceArray, b: DeviceArray, bias: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        """Start out = a @ op(b) + bias, of the type of out, rounded once, if the library has such a product; return whether it was started."""

    def gemm_with_gelu_slope(self, a: DeviceArray, b: DeviceArray, x: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        """Start out = a @ op(b) * gelu_new'(x), rounded once, if the library has such a product; return whether it was started."""

    def whole_attention(self, shape: WholeShape, *tiles: DeviceArray) -> bool:
        """Start a library's attention of whole sequences, if one has been opened and supports the shape; return whether it was started.

        Args:
            shape: description of the attention.
            tiles: q, k, v, o, lse for the forward pass; then also do, dq, dk, dv for the backward pass.
        """

    def start_external(self, start: Callable[[StreamPointer], None]) -> None:
        """Let `start` put kernels of another library on this device's stream: now, or on an emulated device when it is their turn."""


_current = threading.local()


def use(device: Device) -> None:
    """Make kernels that this thread runs compute on `device`."""
    _current.device = device
    _current.layouts = {}


def device() -> Device:
    """Return the device of this thread.

    Raises:
        AttributeError: this thread has not called `use`.
    """
    current: Device = _current.device
    return current


class KernelSource:
    """The kernels of one file.

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
        """Start a kernel for elements of type `element`."""
        if element not in ELEMENTS:
            raise TypeError(f"CUDA kernels compute tiles of fp32 and bf16, and {kernel} got {element}; use one of these, or compute on the CPU")
        if grid[1] > MOST_BLOCKS_ASIDE or grid[2] > MOST_BLOCKS_ASIDE:
            raise ValueError(
                f"CUDA takes {MOST_BLOCKS_ASIDE:,} blocks along the second and third axis of a grid, and {kernel} got {grid}; use smaller tiles of "
                "sequences or rows, or compute on the CPU"
            )
        layouts: dict[tuple[str, str], Arguments] = _current.layouts
        packed = layouts.get((self.name, kernel))
        if packed is None:
            packed = layouts[self.name, kernel] = Arguments(arguments)
        packed.fill(arguments)
        device().start(self.name, ELEMENTS[element], kernel, grid, threads, shared, packed)

    def each(self, kernel: str, element: np.dtype[Any], count: int, *arguments: Argument, is_wide: bool = False) -> None:
        """Start a kernel that processes `count` numbers, 16 bytes at a time if `is_wide`; `count` is its last argument."""
        blocks = blocks_for(count, 16 // element.itemsize if is_wide else 1)
        if blocks:
            self.start(kernel, element, *arguments, np.int64(count), grid=(blocks, 1, 1))

    def by_row(self, kernel: str, x: DeviceArray, *arguments: Argument) -> None:
        """Start a kernel with a block for each row of `x` and 4 bytes of shared memory per thread."""
        num_rows = x.size // x.shape[-1]
        threads = threads_for(x.shape[-1], num_rows)
        self.start(kernel, x.dtype, *arguments, grid=(num_rows, 1, 1), threads=threads, shared=4 * threads)


def blocks_for(count: int, per_thread: int = 1) -> int:
    """Return the number of blocks of a kernel whose threads process `per_thread` of `count` numbers each, or more if there are too many."""
    return min(MOST_BLOCKS, -(-count // (per_thread * THREADS)))


def threads_for(width: int, num_rows: int) -> int:
    """Return a power of two, from 32 to 1024: the number of threads for each row of `width` numbers.

    They are enough for all multiprocessors of a large GPU, and at most one for about eight numbers.
    """
    threads = 32
    while threads < min(1024, width // 8) and threads * num_rows < _ROW_THREADS:
        threads *= 2
    return threads


def _format(argument: Argument) -> str:
    """Return the code of the `struct` module for an argument in a slot; a value is at the beginning of its slot."""
    if argument is None or isinstance(argument, DeviceArray):
        return "Q"
    kind = argument.dtype.kind
    if kind == "V":
        return f"{-(-argument.dtype.itemsize // 8) * 8}s"
    if kind == "f":
        return "f4x" if argument.dtype.itemsize == 4 else "d"
    return "q" if kind == "i" else "Q"
