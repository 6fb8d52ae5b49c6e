"""What every call of `FakeCuda` needs: errors, handles, the current device of a thread, and the records of what was put on streams."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from .gpu import FakeGpu, FakeStream
from .hazards import Access, Clock, Hazards

INVALID: Final = 1
BAD_HANDLE: Final = 400
NOT_READY: Final = 600
"""cudaError_t: an invalid value, an invalid resource handle, not ready."""
_BAD_DEVICE, _UNSUPPORTED, _IMPLICIT = 101, 900, 906
MOST_SHARED: Final = 227 << 10
"""Bytes of shared memory that a block of an H100 may have."""


class CUDARuntimeError(RuntimeError):
    """An error of the runtime, of CuPy's name, by which our code knows it.

    Args:
        status: cudaError_t.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"cudaError {status}: {text}")
        self.status = status


@dataclass(eq=False)
class QueueOfWork:
    """A stream: its work, its clock, and what is recorded on it, by which thread."""

    device: int
    steps: FakeStream
    clock: Clock = field(default_factory=Clock)
    recorded: list[PieceOfWork] | None = None
    is_invalid: bool = False
    owner: threading.Thread | None = None


@dataclass(eq=False)
class EventOfWork:
    """An event: the clock of its last record, how often it was recorded and passed, and the stream whose graph it is in."""

    device: int
    has_timing: bool
    clock: Clock | None = None  # of the stream where it was recorded last
    asked: int = 0
    done: int = 0
    time: float = 0.0
    captured: QueueOfWork | None = None


class PieceOfWork(NamedTuple):
    """A copy, a kernel or a product."""

    name: str
    accesses: tuple[Access, ...]
    step: Callable[[], object]


@dataclass(eq=False)
class RecordedWork:
    """A graph."""

    device: int
    works: list[PieceOfWork]


class StartableWork(RecordedWork):
    """A graph that was instantiated."""


class CudaCalls:
    """Devices, handles and what is refused.

    Args:
        num_devices: cards.
        memory: bytes of each.
        seed: of the order in which streams go on.

    Attributes:
        found: what was refused, in words; errors of which our code is not the cause are none of it.
        reserved: memory of devices, address -> (device, bytes).
    """

    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97

    def __init__(self, num_devices: int, memory: int, seed: int) -> None:
        self.memory = memory
        first = FakeGpu("card 0", seed=seed)
        self.devices = [first, *(FakeGpu(f"card {number}", beside=first) for number in range(1, num_devices))]
        self.lock = first.lock
        self.found: list[str] = []
        self.hazards = Hazards()
        self.reserved: dict[int, tuple[int, int]] = {}
        self._faults: dict[int, int] = {}
        self._numbers = count(0x7000_0000_1000, 0x100)
        self._handles: dict[int, Any] = {}
        self._here = threading.local()

    def refuse(self, text: str, status: int = INVALID) -> CUDARuntimeError:
        """Note what is wrong; the error that a caller gets."""
        self.found.append(text)
        return CUDARuntimeError(status, text)

    def break_device(self, device: int, status: int = 700) -> None:
        """Let every call that concerns a card fail from now on, as after a fault of a kernel."""
        self._faults[device] = status

    def _look(self, device: int) -> None:
        status = self._faults.get(device)
        if status is not None:
            raise CUDARuntimeError(status, "planted: an illegal memory access was encountered")

    def _number(self, name: str, value: object, most: int = (1 << 63) - 1) -> int:
        try:
            found = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise self.refuse(f"{name} is a number, got {value!r}") from None
        if not 0 <= found <= most:
            raise self.refuse(f"{name} is between 0 and {most}, got {found}")
        return found

    def _of(self, kind: type, number: object, name: str) -> Any:
        found = self._handles.get(self._number(name, number))
        if type(found) is not kind:
            if not number and kind is QueueOfWork:
                status = _IMPLICIT if self._capturing() is not None else BAD_HANDLE
                raise self.refuse("the legacy stream waits for nothing here, and nothing for it; use a stream of one's own", status)
            raise self.refuse(f"{number!r} is not {name}, or was destroyed", BAD_HANDLE)
        thing: Any = found
        self._look(thing.device)
        return thing

    def _capturing(self) -> QueueOfWork | None:
        """The stream on which the calling thread records a graph."""
        return getattr(self._here, "capturing", None)

    def _unsafe(self, call: str) -> None:
        """Refuse a call that may not be made while the calling thread records a graph (cudaStreamCaptureModeThreadLocal)."""
        stream = self._capturing()
        if stream is not None:
            stream.is_invalid = True
            raise self.refuse(f"{call} was called while a graph is recorded", _UNSUPPORTED)

    def _keep(self, thing: Any) -> int:
        number = next(self._numbers)
        self._handles[number] = thing
        return number

    def getDeviceCount(self) -> int:
        """Cards."""
        return len(self.devices)

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        """Of a card like an H100."""
        return {"name": b"Stand-in", "major": 9, "minor": 0}

    def deviceGetAttribute(self, attribute: int, index: int) -> int:
        """The one attribute that is asked for."""
        if attribute != self.cudaDevAttrMaxSharedMemoryPerBlockOptin:
            raise self.refuse(f"no such attribute is known here: {attribute}")
        return MOST_SHARED

    def deviceGetPCIBusId(self, index: int) -> str:
        """Of a card."""
        return f"0000:{index:02x}:00.0"

    def deviceCanAccessPeer(self, here: int, there: int) -> int:
        """All cards reach each other."""
        return int(here != there)

    def _deviceEnsurePeerAccess(self, there: int) -> None:
        self._device(there)

    def _device(self, index: object) -> int:
        found = self._number("a device", index)
        if found >= len(self.devices):
            raise self.refuse(f"there are {len(self.devices)} devices, got {found}", _BAD_DEVICE)
        return found

    def getDevice(self) -> int:
        """Of the calling thread."""
        return getattr(self._here, "device", 0)

    def setDevice(self, index: int) -> None:
        """Of the calling thread."""
        self._here.device = self._device(index)

    def memGetInfo(self) -> tuple[int, int]:
        """Free and all bytes of the current device."""
        self._look(self.getDevice())
        self._unsafe("memGetInfo")
        return self.memory - sum(size for device, size in self.reserved.values() if device == self.getDevice()), self.memory

    def check_status(self, status: int) -> None:
        """Raise an error, and clear the thread's last one."""
        if status:
            self._here.last = 0
            raise CUDARuntimeError(status, "as asked")

    @property
    def last_error(self) -> int:
        """What cudaGetLastError would say to the calling thread."""
        return getattr(self._here, "last", 0)
