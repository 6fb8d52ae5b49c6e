"""GPUs through CuPy: the search for GPUs, and `gpu.Gpu` for one of them.

CuPy is imported when a GPU is requested, never before. Streams, events and copies use the CUDA runtime. Allocation and page-locking use the driver
directly, because an error of the driver does not appear in the next call of another library. Error numbers are those of CUDA (cudaError_t), which
driver and runtime share.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Final

from ..core.errors import DeviceFailed, DoesNotFit
from ..core.shortage import Shortage
from .gpu import Event, NoGpu, Stream, device_failed

PACKAGES: Final = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
INSTALL: Final = "pip install -e '.[cuda13]' (drivers from 580) or '.[cuda12]' (drivers from 525)"
MOST_PARTITIONS: Final = 16
"""Largest number of partitions of one GPU."""
CONTEXT_NBYTES: Final = 512 << 20
"""Device memory outside the budget: loaded kernels, workspace of matrix products, local memory; bytes."""

_OUT_OF_MEMORY: Final = 2
_INSUFFICIENT_DRIVER: Final = 35
NOT_READY: Final = 600
"""cudaErrorNotReady: the queried event has not passed."""
_ASKED_WRONG: Final = (1, 98, 200, 209, 400, 500, 701, *range(900, 910))
"""Errors of the caller: an invalid value, handle, kernel or graph. Any other error means that the device has stopped working."""
_PORTABLE: Final = 1


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Properties of a GPU that is not in use yet.

    Args:
        index: CUDA's index, after CUDA_VISIBLE_DEVICES.
        name: CUDA's name of the model.
        capability: compute capability times ten, such as 90 for 9.0.
        nbytes: bytes of its memory.
        free_nbytes: free bytes, once this process has a context on it.
    """

    index: int
    name: str
    capability: int
    nbytes: int
    free_nbytes: int


def installed_packages() -> list[str]:
    """Return the names of the installed distributions of CuPy; exactly one is correct."""
    if find_spec("cupy") is None:
        return []
    found = {str(distribution.name).lower() for distribution in metadata.distributions() if distribution.name}
    return [name for name in PACKAGES if name in found]


def find_gpus(
    packages: Callable[[], Sequence[str]] = installed_packages, runtime: Callable[[], Any] | None = None, most: int | None = None
) -> list[GpuFacts]:
    """Return the GPUs that this process may use. Inspecting a GPU creates a context on it, which takes memory and may block exclusive use by others.

    Args:
        packages: function that returns the installed distributions of CuPy.
        runtime: function that imports and returns CuPy's `cuda.runtime`.
        most: number of GPUs to inspect, from the first; None for all.

    Raises:
        NoGpu: there is no GPU, or CUDA cannot use it.
    """
    installed = packages()
    if not installed:
        raise NoGpu("GPUs are used through CuPy, and it is not installed", INSTALL)
    if len(installed) > 1:
        raise NoGpu(
            f"one CuPy package must be installed, and there are {' and '.join(installed)}, which overwrite each other",
            f"pip uninstall {' '.join(installed)}, then {INSTALL}",
        )
    try:
        cuda = (runtime or _runtime)()
    except ImportError as error:
        raise NoGpu(f"{installed[0]} is installed and cannot be imported ({error})", f"{INSTALL} brings the libraries that it needs") from error
    try:
        count = int(cuda.getDeviceCount())
        return [_facts(cuda, index) for index in range(count if most is None else min(most, count))]
    except RuntimeError as error:
        raise NoGpu(*_reason(cuda, installed[0], error)) from error


@contextmanager
def device_of_thread(cuda: Any, index: int) -> Iterator[None]:
    """Make a card the calling thread's current device for the block only.

    The thread may be the program's, which works on a device of its own, or the worker of another GPU, whose kernels would fail on this one.
    """
    before = cuda.getDevice()
    cuda.setDevice(index)
    try:
        yield
    finally:
        cuda.setDevice(before)


def _facts(cuda: Any, index: int) -> GpuFacts:
    properties = cuda.getDeviceProperties(index)
    with device_of_thread(cuda, index):
        free, total = cuda.memGetInfo()
    name = properties["name"]
    name = name.decode() if isinstance(name, bytes) else str(name)
    return GpuFacts(index, name, 10 * int(properties["major"]) + int(properties["minor"]), int(total), int(free))


def _reason(cuda: Any, package: str, error: RuntimeError) -> tuple[str, str]:
    """Return the reason why CUDA finds no GPU, and the remedy."""
    if getattr(error, "status", None) == _INSUFFICIENT_DRIVER:
        driver = int(cuda.driverGetVersion())
        if not driver:
            return "no NVIDIA driver is loaded here (libcuda.so.1 is missing or answers nothing)", "install one"
        wants = int(cuda.runtimeGetVersion())
        return (
            f"the NVIDIA driver here supports CUDA up to {_version(driver)}, and {package} needs {_version(wants)}",
            f"update the driver, or install the CuPy of an older CUDA: {INSTALL}",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA finds no GPU to use ({error}) with CUDA_VISIBLE_DEVICES={visible!r}", "change it"
    return f"CUDA finds no GPU to use ({error})", "see what nvidia-smi says"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def choose_gpus(count: int | None, found: Callable[[], list[GpuFacts]] | None = None) -> list[GpuFacts]:
    """Return the GPUs of a run.

    Args:
        count: number of GPUs, from the first; None for all GPUs, or for none if CuPy is not installed.
        found: function that returns the present GPUs; `find_gpus` unless given.

    Raises:
        NoGpu: there are fewer than `count`, or CuPy is installed and finds none.
    """
    if count == 0 or (count is None and not installed_packages()):
        return []
    gpus = find_gpus(most=count) if found is None else found()
    if count is not None and count > len(gpus):
        names = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus) or "none"
        raise NoGpu(
            f"must be at most the number of GPUs that CUDA shows, got {count} and there are {len(gpus)} ({names})", "lower it", requested=count
        )
    return gpus[:count]


@cache
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


@cache
def _driver() -> Any:
    """Return the driver's own interface (libcuda)."""
    return typed_driver(ctypes.CDLL("libcuda.so.1"))


def typed_driver(library: Any) -> Any:
    """Return the driver with typed functions, all of which return a CUresult; without the types, ctypes would cut addresses to 32 bits."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, list[Any]] = {
        "cuMemAlloc_v2": [ctypes.POINTER(ctypes.c_uint64), size],
        "cuMemFree_v2": [ctypes.c_uint64],
        "cuMemHostRegister_v2": [pointer, size, ctypes.c_uint],
        "cuMemHostUnregister": [pointer],
    }
    for name, argtypes in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, ctypes.c_int
    return library


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of CUDA, or of a library above it, means that the device has no memory left."""
    return getattr(error, "status", None) == _OUT_OF_MEMORY or "ALLOC_FAILED" in str(error)


def is_fatal(error: RuntimeError) -> bool:
    """Return whether an error of CUDA means that the device has stopped working."""
    status = getattr(error, "status", None)
    if "EXECUTION_FAILED" in str(error):  # errors of cuBLAS and cuDNN
        return True
    return type(error).__name__ in ("CUDARuntimeError", "CUDADriverError") and status != _OUT_OF_MEMORY and status not in _ASKED_WRONG


class CupyEvent:
    """`gpu.Event` as a CUDA event."""

    __slots__ = ("_cuda", "number")

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.number = cuda.eventCreateWithFlags(cuda.eventBlockingSync)

    def is_done(self) -> bool:
        """Return whether the device has passed the event."""
        status = self._cuda.eventQuery(self.number)
        if status and status != NOT_READY:
            self.wait()  # raises with the error's name
        return bool(status == 0)

    def wait(self) -> None:
        """Wait until the device has passed the event; the GIL is released meanwhile."""
        self._cuda.eventSynchronize(self.number)

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds on the device between an earlier event and this one."""
        assert isinstance(earlier, CupyEvent)
        return float(self._cuda.eventElapsedTime(earlier.number, self.number)) * 1e-3

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter, or the device, may be gone
            self._cuda.eventDestroy(self.number)


class CupyGraph:
    """An instantiated CUDA graph. A graph that is destroyed while it runs finishes first (cuGraphExecDestroy)."""

    __slots__ = ("_cuda", "number")

    def __init__(self, cuda: Any, graph: int) -> None:
        self._cuda = cuda
        self.number = int(cuda.graphInstantiate(graph))

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter, or the device, may be gone
            self._cuda.graphExecDestroy(self.number)


class CupyStream:
    """`gpu.Stream` as a non-blocking CUDA stream, which does not synchronise with the default stream."""

    __slots__ = ("_cuda", "_default", "number", "owner")

    def __init__(self, cuda: Any) -> None:
        import cupy

        self._cuda = cuda
        self._default = cuda.memcpyDefault
        self.owner = cupy.cuda.Stream(non_blocking=True)
        self.number = self.owner.ptr

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes; the driver finds the memory of an address by itself."""
        if nbytes:
            self._cuda.memcpyAsync(target, source, nbytes, self._default, self.number)

    def record(self, event: Event) -> None:
        """Make the event mark the current end of the stream."""
        self._cuda.eventRecord(event.number, self.number)  # type: ignore[attr-defined]

    def start(self, graph: object) -> None:
        """Launch a graph on the stream."""
        self._cuda.graphLaunch(graph.number, self.number)  # type: ignore[attr-defined]

    def hold(self, event: Event) -> None:
        """Make later work on the stream wait for the event."""
        self._cuda.streamWaitEvent(self.number, event.number)  # type: ignore[attr-defined]


def name_of(facts: GpuFacts, partition: int | None) -> str:
    """Return the name of a GPU, or of a partition of one, in reports and messages."""
    return f"GPU {facts.index} ({facts.name})" + ("" if partition is None else f", part {partition}")


class CupyGpu:
    """The interface `gpu.Gpu` for one GPU, or with `partition` for one of several partitions of a card.

    Args:
        facts: properties of the card.
        partition: number of the partition; None for a whole card.
    """

    def __init__(self, facts: GpuFacts, partition: int | None = None) -> None:
        self.index = facts.index
        self.facts = facts
        self.name = name_of(facts, partition)
        self._cuda = _runtime()
        self._sizes: dict[int, int] = {}
        self.num_started = 0

    def adopt(self) -> None:
        """Make this GPU the calling thread's current device."""
        self._cuda.setDevice(self.index)

    def visit(self) -> AbstractContextManager[None]:
        """Make this GPU the calling thread's current device for a block only."""
        return device_of_thread(self._cuda, self.index)

    def enter(self, stream: Stream) -> None:
        """Direct kernels and library calls of the calling thread to a stream of this GPU."""
        self.adopt()
        stream.owner.use()  # type: ignore[attr-defined]

    def reserve(self, nbytes: int) -> int:
        """Allocate memory and return its address.

        Raises:
            DoesNotFit: the GPU has fewer free bytes.
        """
        address = ctypes.c_uint64()
        with self.visit():
            self._cuda.free(0)  # makes the device's context current, which the driver needs
            status = _driver().cuMemAlloc_v2(ctypes.byref(address), nbytes)
            free, total = self._cuda.memGetInfo() if status else (0, 0)
        if status:
            fact = f"{self.name} did not give {nbytes:,} bytes (CUDA error {status}): {free:,} of its {total:,} are free"
            shortage = Shortage("reserve", self.name, nbytes, free)
            raise DoesNotFit(shortage, fact, "lower the budget of the device, or end other programs that use the card")
        self._sizes[address.value] = nbytes
        return address.value

    def release(self, address: int) -> None:
        """Free the memory at an address that `reserve` has returned."""
        del self._sizes[address]
        with self.visit():
            _driver().cuMemFree_v2(address)

    def stream(self) -> CupyStream:
        """Return a new stream."""
        with self.visit():
            return CupyStream(self._cuda)

    def event(self) -> CupyEvent:
        """Return a new event."""
        with self.visit():
            return CupyEvent(self._cuda)

    def capture(self, stream: Stream, run: Callable[[], None]) -> CupyGraph:
        """Record the kernels that `run` starts on a stream as a graph.

        Raises:
            RuntimeError: a library call cannot be recorded.
        """
        number = stream.number  # type: ignore[attr-defined]
        self._cuda.streamBeginCapture(number, self._cuda.streamCaptureModeThreadLocal)
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # the capture ends without a graph, as it should
                self._cuda.streamEndCapture(number)
            raise
        graph = self._cuda.streamEndCapture(number)
        try:
            return CupyGraph(self._cuda, graph)
        finally:
            self._cuda.graphDestroy(graph)

    def pin(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory for all GPUs; return whether the system allowed it."""
        with self.visit():
            self._cuda.free(0)
            return bool(_driver().cuMemHostRegister_v2(address, nbytes, _PORTABLE) == 0)

    def unpin(self, address: int) -> None:
        """Unlock the host memory at an address that `pin` has locked."""
        with self.visit():
            _driver().cuMemHostUnregister(address)

    def close(self) -> None:
        """Free all reserved memory; nothing can be computed after that."""
        for address in list(self._sizes):
            self.release(address)

    def failed(self, error: RuntimeError) -> DeviceFailed:
        """Return the error that a program receives when the card has stopped working."""
        return device_failed(self, error)


def connect(gpus: Sequence[CupyGpu]) -> list[tuple[int, int]]:
    """Enable peer access between the cards that support it; return these pairs as (from, to). The driver copies other pairs through host memory."""
    cuda, pairs = _runtime(), []
    cards = {gpu.index: gpu for gpu in gpus}
    for here in sorted(cards):
        for there in sorted(cards):
            if here != there and cuda.deviceCanAccessPeer(here, there):
                with cards[here].visit():
                    cuda._deviceEnsurePeerAccess(there)
                pairs.append((here, there))
    return pairs
