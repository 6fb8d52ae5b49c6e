"""A GPU that computes nothing in no time: what is left of a step on it is the host's work, up to the point where the driver would be called.

Memory is a range of addresses with nothing behind it, so models of any size fit. A call of the driver only counts itself. What a call costs on a card
(some microseconds a kernel by itself, some hundred nanoseconds a kernel of a graph) is not in any time measured here; the counts say how many there
would be.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from .array import DeviceArray
from .launch import PARTIALS_NBYTES, Arguments, StreamPointer, use
from .library_attention import WholeShape
from .products import column_major

_FIRST_ADDRESS: Final = 1 << 44
"""Above all host memory."""


class HollowEvent:
    """A point that has passed."""

    def __init__(self, gpu: HollowGpu) -> None:
        self._gpu = gpu

    def is_done(self) -> bool:
        """Always."""
        self._gpu.calls["event query"] += 1
        return True

    def wait(self) -> None:
        """No time passes."""

    def seconds_since(self, earlier: HollowEvent) -> float:
        """A microsecond."""
        return 1e-6


class HollowStream:
    """Work that is over as soon as it is there."""

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
        """Count a graph, and its kernels."""
        self._gpu.calls["graph"] += 1
        self._gpu.kernels.update(graph)

    def hold(self, event: HollowEvent) -> None:
        """Count a wait of the stream."""
        self._gpu.calls["stream wait"] += 1


class HollowGpu:
    """Answers `Gpu` for the scheduler and `launch.Device` for kernels.

    Args:
        memory: bytes that it has.

    Attributes:
        calls: of the driver, by kind; kernels of a graph are one call.
        kernels: started, by name, those of graphs among them.
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

    def reserve(self, nbytes: int) -> int:
        """The address of some memory."""
        return next(self._addresses)

    def release(self, address: int) -> None:
        """Nothing to do."""

    def stream(self) -> HollowStream:
        """A new stream."""
        return HollowStream(self)

    def event(self) -> HollowEvent:
        """A new event."""
        return HollowEvent(self)

    def enter(self, stream: HollowStream) -> None:
        """The calling thread computes here."""
        use(self)

    def adopt(self) -> None:
        """Nothing to do."""

    def capture(self, stream: HollowStream, run: Callable[[], None]) -> Counter[str]:
        """The kernels that `run` starts."""
        found = self._captured = Counter()
        try:
            run()
        finally:
            self._captured = None
        return found

    def pin(self, address: int, nbytes: int) -> bool:
        """Host memory stays as it is."""
        return False

    def unpin(self, address: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def start(self, source: str, element: str, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Arguments) -> None:
        """Count a kernel, after the look-up of its function."""
        function = self._functions.get((source, element, kernel))
        if function is None:
            function = self._functions[source, element, kernel] = kernel
        self._count(function)

    def gemm(self, a: DeviceArray, b: DeviceArray, out: DeviceArray, **options: Any) -> None:
        """Count a product, after its arguments have been worked out."""
        column_major(a, b, out, trans_a=options["trans_a"], trans_b=options["trans_b"], stride_a=options.get("stride_a"))
        self._count("product")

    def whole_attention(self, shape: WholeShape, *tiles: DeviceArray) -> bool:
        """There is no library."""
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
