"""Measurement of attention of whole sequences on a GPU, by the kernels that the device uses now: ours, or cuDNN's if it has been opened.

Kernels are started as graphs of several calls, as in fused tasks, so that the time is the GPU's and not that of the calls from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from statistics import median
from typing import Any, Final

import numpy as np

from scheduler.drivers import CupyStream

from ..catalog import kernel
from ..cpu.attention_blocks import whole_scratch_nbytes
from ..reference.attention import Pair
from ..registry import BF16
from .array import DeviceArray
from .device import CudaDevice
from .library_attention import WholeShape

CALLS: Final = 10
"""Number of calls of a kernel in a round; results are seconds per call."""
ROUNDS: Final = 5
"""Number of timed rounds; the median counts."""
_APART: Final = 256
"""Alignment of tiles in bytes."""
_FILL: Final = 1 << 20
"""Number of random values that inputs repeat; zeros would be faster than real data."""


def attention_seconds(device: CudaDevice, shape: WholeShape) -> tuple[float, float]:
    """Return the median seconds of the forward and of the backward pass on bf16 tiles. The calling thread keeps its device and its stream.

    Raises:
        MemoryError: the GPU has no room for the tiles.
        DoesNotFit, DeviceFailed: a kernel failed.
    """
    stream = device.stream()
    with device.visit(), stream.owner, _tiles(device, stream, shape) as tiles:
        whole = Pair(shape.size, shape.scale, shape.causal, 0, 0, 0, 0, shape.heads, shape.tq, num_keys=shape.tk)
        q, k, v, o, lse, do, dq, dk, dv, scratch = tiles
        device.enter(stream)
        forward = _seconds(device, stream, lambda: kernel("whole_attention", "cuda")(q, k, v, o, lse, scratch, at=whole))
        return forward, _seconds(
            device, stream, lambda: kernel("whole_attention_backward", "cuda")(q, k, v, o, lse, do, dq, dk, dv, scratch, at=whole)
        )


@contextmanager
def _tiles(device: CudaDevice, stream: CupyStream, shape: WholeShape) -> Iterator[list[DeviceArray]]:
    """Yield q, k, v, o, lse, do, dq, dk, dv and scratch on the device; inputs hold random numbers."""
    wide, narrow = (shape.b, shape.tq, shape.heads * shape.size), (shape.b, shape.tk, shape.groups * shape.size)
    rows, single = (shape.b, shape.heads, shape.tq), np.dtype(np.float32)
    scratch = whole_scratch_nbytes(prod(rows), shape.tq, shape.tk, single.itemsize), np.dtype(np.uint8)
    layout = [*((each, BF16) for each in (wide, narrow, narrow, wide)), (rows, single), *((each, BF16) for each in (wide, wide, narrow, narrow))]
    arrays = [DeviceArray(0, extents, np.dtype(dtype)) for extents, dtype in [*layout, ((scratch[0],), scratch[1])]]
    begin = device.reserve(sum(-(-array.nbytes // _APART) * _APART for array in arrays))
    values = np.random.default_rng(0).standard_normal(_FILL, np.float32).astype(BF16)
    try:
        tiles, address = [], begin
        for array in arrays:
            tiles.append(DeviceArray(address, array.shape, array.dtype))
            for offset in range(0, array.nbytes if array.dtype == BF16 else 0, values.nbytes):
                stream.copy(address + offset, values.ctypes.data, min(values.nbytes, array.nbytes - offset))
            address += -(-array.nbytes // _APART) * _APART
        yield tiles
    finally:
        device.release(begin)


def _seconds(device: CudaDevice, stream: CupyStream, call: Callable[[], Any]) -> float:
    begin, end, seconds = device.event(), device.event(), []

    def calls() -> None:
        for _ in range(CALLS):
            call()

    call()  # compiles sources and makes plans
    stream.record(end)
    end.wait()
    try:
        start = _starter(device, stream, calls)
    except RuntimeError:  # a library may make calls that cannot be recorded; fused tasks then also start them one by one
        start = calls
    for number in range(ROUNDS + 1):
        stream.record(begin)
        start()
        stream.record(end)
        end.wait()
        if number:  # the first round only warms up the GPU
            seconds.append(end.seconds_since(begin) / CALLS)
    return median(seconds)


def _starter(device: CudaDevice, stream: CupyStream, calls: Callable[[], None]) -> Callable[[], None]:
    graph = device.capture(stream, calls)
    return lambda: stream.start(graph)
