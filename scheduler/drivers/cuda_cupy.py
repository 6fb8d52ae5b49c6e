"""GPUs through CuPy: which there are, and `gpu.Gpu` for one of them.

CuPy is imported when a GPU is asked for, never before. Streams, events and copies are the CUDA runtime's; memory and locking of host memory go to the
driver itself, because a refusal there leaves no error behind for the next call of another library to find. Numbers of errors are those of CUDA
(cudaError_t); the driver and the runtime use the same.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Final

from ..core.errors import DeviceFailed
from .gpu import Event, Stream, device_failed

PACKAGES: Final = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
INSTALL: Final = "pip install 'cupy-cuda12x[ctk]>=14' (drivers from 525) or 'cupy-cuda13x[ctk]>=14' (drivers from 580)"
MOST_PARTS: Final = 16
"""Of one GPU."""
CONTEXT_NBYTES: Final = 512 << 20
"""Beside the budget: kernels as they are loaded, workspace of products, local memory."""

_OUT_OF_MEMORY: Final = 2
_INSUFFICIENT_DRIVER: Final = 35
_NOT_READY: Final = 600
_ASKED_WRONG: Final = (1, 98, 200, 209, 400, 500, 701, *range(900, 910))
"""Our mistakes: a value, a handle a kernel or a graph that the device does not take. Whatever else is raised means that it works no more."""
_PORTABLE: Final = 1


class NoGpu(ValueError):
    """GPUs were asked for that are not to be had; the message is one sentence with the way out."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What is known of a GPU before it is used.

    Args:
        index: as CUDA counts, after CUDA_VISIBLE_DEVICES.
        capability: such as 90, for 9.0.
        nbytes, free_nbytes: of its memory; free ones once a program like ours has begun to use it.
    """

    index: int
    name: str
    capability: int
    nbytes: int
    free_nbytes: int


def installed_packages() -> list[str]:
    """Distributions of CuPy that are installed; one is as it should be."""
    if find_spec("cupy") is None:
        return []
    found = {str(distribution.name).lower() for distribution in metadata.distributions() if distribution.name}
    return [name for name in PACKAGES if name in found]


def find_gpus(
    packages: Callable[[], Sequence[str]] = installed_packages, runtime: Callable[[], Any] | None = None, most: int | None = None
) -> list[GpuFacts]:
    """GPUs that this process may use. Each that is looked at takes some memory for this process, and may belong to another one alone.

    Args:
        packages: what of CuPy is installed.
        runtime: imports CuPy's `cuda.runtime`.
        most: how many are looked at, the first ones, where there are so many; else all are.

    Raises:
        NoGpu: there is none, or it cannot be used.
    """
    installed = packages()
    if not installed:
        raise NoGpu(f"GPUs are used through CuPy, and it is not installed; {INSTALL}, or compute on the CPU with --ngpu 0")
    if len(installed) > 1:
        raise NoGpu(
            f"one CuPy package must be installed, and there are {' and '.join(installed)}, which overwrite each other; "
            f"pip uninstall {' '.join(installed)}, then {INSTALL}"
        )
    try:
        cuda = (runtime or _runtime)()
    except ImportError as error:
        raise NoGpu(f"{installed[0]} is installed and cannot be imported ({error}); {INSTALL} brings the libraries that it needs") from error
    try:
        count = int(cuda.getDeviceCount())
        return [_facts(cuda, index) for index in range(count if most is None else min(most, count))]
    except RuntimeError as error:
        raise NoGpu(_reason(cuda, installed[0], error)) from error


def _facts(cuda: Any, index: int) -> GpuFacts:
    properties = cuda.getDeviceProperties(index)
    cuda.setDevice(index)
    free, total = cuda.memGetInfo()
    name = properties["name"]
    name = name.decode() if isinstance(name, bytes) else str(name)
    return GpuFacts(index, name, 10 * int(properties["major"]) + int(properties["minor"]), int(total), int(free))


def _reason(cuda: Any, package: str, error: RuntimeError) -> str:
    """Why CUDA finds no GPU."""
    if getattr(error, "status", None) == _INSUFFICIENT_DRIVER:
        driver = int(cuda.driverGetVersion())
        if not driver:
            return "no NVIDIA driver is loaded here (libcuda.so.1 is missing or answers nothing); install one, or compute on the CPU with --ngpu 0"
        wants = int(cuda.runtimeGetVersion())
        return (
            f"the NVIDIA driver here supports CUDA up to {_version(driver)}, and {package} needs {_version(wants)}; update the driver, or install "
            f"the CuPy of an older CUDA: {INSTALL}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f" with CUDA_VISIBLE_DEVICES={visible!r}; change it" if visible is not None else "; see what nvidia-smi says"
    return f"CUDA finds no GPU to use ({error}){why}, or compute on the CPU with --ngpu 0"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def choose_gpus(count: int | None, found: Callable[[], list[GpuFacts]] | None = None) -> list[GpuFacts]:
    """The GPUs that a run uses.

    Args:
        count: how many, the first ones; None for all there are, or none where CuPy is not installed.
        found: those there are; `find_gpus` unless given.

    Raises:
        NoGpu: there are fewer, or CuPy is installed and finds none.
    """
    if count == 0 or (count is None and not installed_packages()):
        return []
    gpus = find_gpus(most=count) if found is None else found()
    if count is not None and count > len(gpus):
        names = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus) or "none"
        raise NoGpu(f"--ngpu must be at most the number of GPUs that CUDA shows, got {count} and there are {len(gpus)} ({names}); lower it")
    return gpus[:count]


@cache
def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


@cache
def _driver() -> Any:
    """The driver's own interface."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), size]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    library.cuMemHostRegister_v2.argtypes = [pointer, size, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [pointer]
    return library


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether CUDA, or a library above it, has asked for memory that the device does not have."""
    return getattr(error, "status", None) == _OUT_OF_MEMORY or "ALLOC_FAILED" in str(error)


def is_fatal(error: RuntimeError) -> bool:
    """Whether an error of CUDA means that the device works no more."""
    status = getattr(error, "status", None)
    if "EXECUTION_FAILED" in str(error):  # of cuBLAS and cuDNN
        return True
    return type(error).__name__ in ("CUDARuntimeError", "CUDADriverError") and status != _OUT_OF_MEMORY and status not in _ASKED_WRONG


class CupyEvent:
    """A point of a stream, with its time."""

    __slots__ = ("_cuda", "number")

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.number = cuda.eventCreateWithFlags(cuda.eventBlockingSync)

    def is_done(self) -> bool:
        """Whether the device is past it."""
        status = self._cuda.eventQuery(self.number)
        if status and status != _NOT_READY:
            self.wait()  # raises with the error's name
        return bool(status == 0)

    def wait(self) -> None:
        """Sleep until it is; other threads run meanwhile."""
        self._cuda.eventSynchronize(self.number)

    def seconds_since(self, earlier: Event) -> float:
        """Between two points."""
        assert isinstance(earlier, CupyEvent)
        return float(self._cuda.eventElapsedTime(earlier.number, self.number)) * 1e-3

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter, or the device, may be gone
            self._cuda.eventDestroy(self.number)


class CupyGraph:
    """Kernels ready to be started; a graph that is under way when it is given up ends first (cuGraphExecDestroy)."""

    __slots__ = ("_cuda", "number")

    def __init__(self, cuda: Any, graph: int) -> None:
        self._cuda = cuda
        self.number = int(cuda.graphInstantiate(graph))

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter, or the device, may be gone
            self._cuda.graphExecDestroy(self.number)


class CupyStream:
    """A stream that waits for no other by itself."""

    __slots__ = ("_cuda", "_default", "number", "owner")

    def __init__(self, cuda: Any) -> None:
        import cupy

        self._cuda = cuda
        self._default = cuda.memcpyDefault
        self.owner = cupy.cuda.Stream(non_blocking=True)
        self.number = self.owner.ptr

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes; the driver knows whose memory an address is."""
        if nbytes:
            self._cuda.memcpyAsync(target, source, nbytes, self._default, self.number)

    def record(self, event: Event) -> None:
        """Let the event stand for this point."""
        self._cuda.eventRecord(event.number, self.number)  # type: ignore[attr-defined]

    def start(self, graph: object) -> None:
        """Start a graph."""
        self._cuda.graphLaunch(graph.number, self.number)  # type: ignore[attr-defined]

    def hold(self, event: Event) -> None:
        """What follows waits for it."""
        self._cuda.streamWaitEvent(self.number, event.number)  # type: ignore[attr-defined]


def name_of(facts: GpuFacts, part: int | None) -> str:
    """What a GPU, or a part of it, is called."""
    return f"GPU {facts.index} ({facts.name})" + ("" if part is None else f", part {part}")


class CupyGpu:
    """One GPU, or with `part` one of several that share a card.

    Args:
        facts: of the card.
        part: its number among those that share it, None where it has the card for itself.
    """

    def __init__(self, facts: GpuFacts, part: int | None = None) -> None:
        self.index = facts.index
        self.facts = facts
        self.name = name_of(facts, part)
        self._cuda = _runtime()
        self._sizes: dict[int, int] = {}

    def adopt(self) -> None:
        """The calling thread will use this GPU."""
        self._cuda.setDevice(self.index)

    @contextmanager
    def _visit(self) -> Iterator[None]:
        """The calling thread uses this GPU for a moment: it may be the worker of another one, whose kernels would fail here."""
        before = self._cuda.getDevice()
        self._cuda.setDevice(self.index)
        try:
            yield
        finally:
            self._cuda.setDevice(before)

    def enter(self, stream: Stream) -> None:
        """Kernels and library calls of the calling thread go to that stream."""
        self.adopt()
        stream.owner.use()  # type: ignore[attr-defined]

    def reserve(self, nbytes: int) -> int:
        """Take memory.

        Raises:
            MemoryError: the GPU has less.
        """
        address = ctypes.c_uint64()
        with self._visit():
            self._cuda.free(0)  # makes the device's context current, which the driver needs
            status = _driver().cuMemAlloc_v2(ctypes.byref(address), nbytes)
            free, total = self._cuda.memGetInfo() if status else (0, 0)
        if status:
            raise MemoryError(
                f"{self.name} did not give {nbytes:,} bytes (CUDA error {status}): {free:,} of its {total:,} are free; lower --gpu-memory, or end "
                "what else uses the card"
            )
        self._sizes[address.value] = nbytes
        return address.value

    def release(self, address: int) -> None:
        """Give it back."""
        del self._sizes[address]
        with self._visit():
            _driver().cuMemFree_v2(address)

    def stream(self) -> CupyStream:
        """A new stream."""
        with self._visit():
            return CupyStream(self._cuda)

    def event(self) -> CupyEvent:
        """A new event."""
        with self._visit():
            return CupyEvent(self._cuda)

    def capture(self, stream: Stream, run: Callable[[], None]) -> CupyGraph:
        """Record kernels as a graph, ready to be started.

        Raises:
            RuntimeError: a library does what cannot be recorded.
        """
        number = stream.number  # type: ignore[attr-defined]
        self._cuda.streamBeginCapture(number, self._cuda.streamCaptureModeThreadLocal)
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # it ends without a graph, which is what we want to hear nothing of
                self._cuda.streamEndCapture(number)
            raise
        graph = self._cuda.streamEndCapture(number)
        try:
            return CupyGraph(self._cuda, graph)
        finally:
            self._cuda.graphDestroy(graph)

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory for all GPUs; whether the system let us."""
        with self._visit():
            self._cuda.free(0)
            return bool(_driver().cuMemHostRegister_v2(address, nbytes, _PORTABLE) == 0)

    def unpin(self, address: int) -> None:
        """Let it go."""
        with self._visit():
            _driver().cuMemHostUnregister(address)

    def close(self) -> None:
        """Give back what was taken beside the budget; nothing can be computed after that."""
        for address in list(self._sizes):
            self.release(address)

    def failed(self, error: RuntimeError) -> DeviceFailed:
        """What a program is told when the card has stopped working."""
        return device_failed(self, error)


def connect(gpus: Sequence[CupyGpu]) -> list[tuple[int, int]]:
    """Let cards reach each other's memory where the hardware can; pairs (from, to) that do. Others copy through host memory, by the driver."""
    cuda, pairs = _runtime(), []
    cards = sorted({gpu.index for gpu in gpus})
    for here in cards:
        for there in cards:
            if here != there and cuda.deviceCanAccessPeer(here, there):
                cuda.setDevice(here)
                cuda._deviceEnsurePeerAccess(there)
                pairs.append((here, there))
    return pairs
