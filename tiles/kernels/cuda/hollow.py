"""A GPU that computes nothing and takes no time, to measure the host's work in a step up to the calls of the driver.

Memory is a range of addresses without storage, so models of any size fit. A call of the driver is only counted. Its cost on a real GPU (some
microseconds for a kernel started alone, some hundred nanoseconds for a kernel of a graph) is in no time measured here; the counts show the number of
calls.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .array import DeviceArray
from .launch import ARRIVALS_NBYTES, PARTIALS_NBYTES, Arguments, Product, StreamPointer, use
from .library_attention import WholeShape
from .products import column_major

_FIRST_ADDRESS: Final = 1 << 44
"""Address above all host memory."""


class HollowEvent:
    """An event that has always passed."""

    def __init__(self, gpu: HollowGpu) -> None:
        self._gpu = gpu

    def is_done(self) -> bool:
        """Return True."""
        self._gpu.calls["event query"] += 1
        return True

    def wait(self) -> None:
        """Return immediately."""

    def seconds_since(self, earlier: HollowEvent) -> float:
        """Return one microsecond."""
        return 1e-6


class HollowStream:
    """A stream whose work ends when it is started."""

    def __init__(self, gpu: HollowGpu) -> None:
        self._gpu = gpu
        self.number = 0

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Count a copy."""
        self._gpu.calls["copy"] += 1

    def record(self, event: HollowEvent) -> None:
        """Count an event."""
        self._gpu.calls["event"] += 1

    def start(self, graph: Counter[str]) -> None:
        """Count a graph and its kernels."""
        self._gpu.calls["graph"] += 1
        self._gpu.kernels.update(graph)

    def hold(self, event: HollowEvent) -> None:
        """Count a wait of the stream."""
        self._gpu.calls["stream wait"] += 1


class HollowGpu:
    """A GPU for tests and benchmarks, with the interfaces `Gpu` of the scheduler and `launch.Device` of kernels.

    Args:
        memory: bytes of memory to report.

    Attributes:
        calls: number of driver calls, by kind; the kernels of a graph are one call.
        kernels: number of started kernels, by name, including those of graphs.
    """

    def __init__(self, memory: int) -> None:
        self.name = "hollow"
        self.memory = memory
        self.num_started = 0  # nothing fails here
        self.calls: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self._addresses = itertools.count(_FIRST_ADDRESS, 1 << 42)
        self._captured: Counter[str] | None = None
        self._functions: dict[tuple[str, str, str], str] = {}
        self.partials = DeviceArray(self.reserve(PARTIALS_NBYTES), (PARTIALS_NBYTES,), np.dtype(np.uint8))
        self.arrivals = DeviceArray(self.reserve(ARRIVALS_NBYTES), (ARRIVALS_NBYTES,), np.dtype(np.uint8))

    def reserve(self, nbytes: int) -> int:
        """Return the address of some memory."""
        return next(self._addresses)

    def release(self, address: int) -> None:
        """Do nothing."""

    def stream(self) -> HollowStream:
        """Return a new stream."""
        return HollowStream(self)

    def event(self) -> HollowEvent:
        """Return a new event."""
        return HollowEvent(self)

    def enter(self, stream: HollowStream) -> None:
        """Make the calling thread compute on this GPU."""
        use(self)

    def adopt(self) -> None:
        """Do nothing."""

    def capture(self, stream: HollowStream, run: Callable[[], None]) -> Counter[str]:
        """Return the kernels that `run` starts."""
        captured = self._captured = Counter()
        try:
            run()
        finally:
            self._captured = None
        return captured

    def pin(self, address: int, nbytes: int) -> bool:
        """Return False: host memory is not pinned."""
        return False

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def start(self, source: str, element: str, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Arguments) -> None:
        """Count a kernel, after looking up its function."""
        function = self._functions.get((source, element, kernel))
        if function is None:
            function = self._functions[source, element, kernel] = kernel
        self._count(function)

    def gemm(self, a: DeviceArray, b: DeviceArray, out: DeviceArray, **options: Any) -> None:
        """Count a product, after computing its arguments."""
        column_major(a, b, out, **{name: value for name, value in options.items() if name not in ("alpha", "accumulate")})
        self._count("product")

    def gemms(self, products: Sequence[Product], *, trans_a: bool, trans_b: bool, accumulate: bool) -> None:
        """Count one product, after computing the arguments of all."""
        for a, b, out in products:
            column_major(a, b, out, trans_a=trans_a, trans_b=trans_b)
        self._count("product")

    def gemm_with_bias(self, a: DeviceArray, b: DeviceArray, bias: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        """Count a product, whatever its shape."""
        self.gemm(a, b, out, trans_a=False, trans_b=trans_b, alpha=1.0, accumulate=False)
        return True

    def gemm_with_gelu_slope(self, a: DeviceArray, b: DeviceArray, x: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        """Count a product, whatever its shape."""
        self.gemm(a, b, out, trans_a=False, trans_b=trans_b, alpha=1.0, accumulate=False)
        return True

    def whole_attention(self, shape: WholeShape, *tiles: DeviceArray) -> bool:
        """Return False: there is no library."""
        return False

    def start_external(self, start: Callable[[StreamPointer], None]) -> None:
        """Count a kernel of another library."""
        self._count("external")

    def _count(self, kernel: str) -> None:
        if self._captured is not None:
            self._captured[kernel] += 1
        else:
            self.kernels[kernel] += 1
            self.calls["kernel"] += 1
