"""The common parts of all calls of `FakeCuda`: errors, handles, the current device of a thread, and records of the work on streams."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from support.hazards import Access, Clock, Hazards

from scheduler.testing import FakeGpu, FakeStream

INVALID: Final = 1
BAD_HANDLE: Final = 400
NOT_READY: Final = 600
"""cudaError_t: an invalid value, an invalid resource handle, not ready."""
_BAD_DEVICE, _UNSUPPORTED, _IMPLICIT = 101, 900, 906
MOST_SHARED: Final = 227 << 10
"""Largest shared memory of a block on an H100, bytes."""


class CUDARuntimeError(RuntimeError):
    """An error of the runtime, with CuPy's name, by which our code recognises it.

    Args:
        status: number of the error, a cudaError_t.
        text: message.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"cudaError {status}: {text}")
        self.status = status


@dataclass(eq=False)
class QueueOfWork:
    """A stream: its work, its clock, the work that is being recorded on it, and the thread that records."""

    device: int
    steps: FakeStream
    clock: Clock = field(default_factory=Clock)
    recorded: list[PieceOfWork] | None = None
    is_invalid: bool = False
    owner: threading.Thread | None = None


@dataclass(eq=False)
class EventOfWork:
    """An event: the clock of its last record, the numbers of times it was recorded and passed, and the stream whose graph it is in."""

    device: int
    has_timing: bool
    clock: Clock | None = None  # clock of the stream that recorded it last
    asked: int = 0
    done: int = 0
    time: float = 0.0
    captured: QueueOfWork | None = None


class PieceOfWork(NamedTuple):
    """A copy, a kernel or a matrix product."""

    name: str
    accesses: tuple[Access, ...]
    step: Callable[[], object]


@dataclass(eq=False)
class RecordedWork:
    """A graph of recorded work."""

    device: int
    works: list[PieceOfWork]


class StartableWork(RecordedWork):
    """An executable graph."""


class CudaCalls:
    """Devices, handles and refused calls.

    Args:
        num_devices: number of cards.
        memory: bytes of each card.
        seed: seed of the order in which streams advance.

    Attributes:
        found: descriptions of refused calls; planted errors, which are no fault of the caller, are not included.
        reserved: memory of devices, address -> (device, bytes).
    """

    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97

    def __init__(self, num_devices: int, memory: int, seed: int) -> None:
        self.memory = memory
        first = FakeGpu("card 0", seed=seed)
        self.devices = [first, *(FakeGpu(f"card {number}", peer=first) for number in range(1, num_devices))]
        self.lock = first.lock
        self.found: list[str] = []
        self.hazards = Hazards()
        self.reserved: dict[int, tuple[int, int]] = {}
        self._faults: dict[int, int] = {}
        self._numbers = count(0x7000_0000_1000, 0x100)
        self._handles: dict[int, Any] = {}
        self._here = threading.local()

    def refuse(self, text: str, status: int = INVALID) -> CUDARuntimeError:
        """Note a wrong call, and return the error for the caller."""
        self.found.append(text)
        return CUDARuntimeError(status, text)

    def break_device(self, device: int, status: int = 700) -> None:
        """Make every call that concerns a card fail from now on, as after a fault of a kernel."""
        self._faults[device] = status

    def _look(self, device: int) -> None:
        status = self._faults.get(device)
        if status is not None:
            raise CUDARuntimeError(status, "planted: an illegal memory access was encountered")

    def _number(self, name: str, value: object, most: int = (1 << 63) - 1) -> int:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise self.refuse(f"{name} is a number, got {value!r}") from None
        if not 0 <= number <= most:
            raise self.refuse(f"{name} is between 0 and {most}, got {number}")
        return number

    def _of(self, kind: type, number: object, name: str) -> Any:
        found = self._handles.get(self._number(name, number))
        if type(found) is not kind:
            if not number and kind is QueueOfWork:
                status = _IMPLICIT if self._capturing() is not None else BAD_HANDLE
                raise self.refuse("the legacy stream and other streams do not wait for each other here; create a stream", status)
            raise self.refuse(f"{number!r} is not {name}, or was destroyed", BAD_HANDLE)
        thing: Any = found
        self._look(thing.device)
        return thing

    def _capturing(self) -> QueueOfWork | None:
        """Return the stream on which the calling thread records a graph; None without one."""
        return getattr(self._here, "capturing", None)

    def _unsafe(self, call: str) -> None:
        """Refuse a call that is forbidden while the calling thread records a graph (cudaStreamCaptureModeThreadLocal)."""
        stream = self._capturing()
        if stream is not None:
            stream.is_invalid = True
            raise self.refuse(f"{call} was called while a graph is being recorded", _UNSUPPORTED)

    def _keep(self, thing: Any) -> int:
        number = next(self._numbers)
        self._handles[number] = thing
        return number

    def getDeviceCount(self) -> int:
        """Return the number of cards."""
        return len(self.devices)

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        """Return the properties of a card like an H100."""
        return {"name": b"Stand-in", "major": 9, "minor": 0}

    def deviceGetAttribute(self, attribute: int, index: int) -> int:
        """Return the only attribute that is known here."""
        if attribute != self.cudaDevAttrMaxSharedMemoryPerBlockOptin:
            raise self.refuse(f"attribute {attribute} is not known here")
        return MOST_SHARED

    def deviceGetPCIBusId(self, index: int) -> str:
        """Return the PCI bus id of a card."""
        return f"0000:{index:02x}:00.0"

    def deviceCanAccessPeer(self, here: int, there: int) -> int:
        """Return 1 for two different cards: all of them have peer access."""
        return int(here != there)

    def _deviceEnsurePeerAccess(self, there: int) -> None:
        self._device(there)

    def _device(self, index: object) -> int:
        number = self._number("a device", index)
        if number >= len(self.devices):
            raise self.refuse(f"there are {len(self.devices)} devices, got {number}", _BAD_DEVICE)
        return number

    def getDevice(self) -> int:
        """Return the current device of the calling thread."""
        return getattr(self._here, "device", 0)

    def setDevice(self, index: int) -> None:
        """Set the current device of the calling thread."""
        self._here.device = self._device(index)

    def memGetInfo(self) -> tuple[int, int]:
        """Return the free and the total bytes of the current device."""
        self._look(self.getDevice())
        self._unsafe("memGetInfo")
        return self.memory - sum(size for device, size in self.reserved.values() if device == self.getDevice()), self.memory

    def check_status(self, status: int) -> None:
        """Raise the error of a status, if it is one, and clear the thread's last error."""
        if status:
            self._here.last = 0
            raise CUDARuntimeError(status, "the checked call returned this status")

    @property
    def last_error(self) -> int:
        """Result of cudaGetLastError for the calling thread."""
        return getattr(self._here, "last", 0)
