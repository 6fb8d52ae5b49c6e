"""CUDA's runtime and driver, by CuPy's names, on host memory; calls that CUDA refuses or leaves undefined are refused.

The real driver code runs over it on a machine without a card. Work is stored and executed late, on the streams of `FakeGpu`. Each call is checked:
types and ranges of arguments, the current device of the thread, the devices of streams, events and kernels, calls that are forbidden while a graph is
being recorded, launch limits, and memory. An address must belong to a live reservation. Two pieces of work that touch the same bytes, one of them
writing, must be ordered by a stream, an event or a wait of the host. The result of a wait counts as known to all threads, so a missing order between
threads alone is not found. Of a kernel, only the first byte at each pointer is known.

Error numbers are cudaError_t. `found` lists everything that was refused, since a caller may swallow an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from support.fake_cuda_calls import BAD_HANDLE, INVALID, MOST_SHARED, QueueOfWork
from support.fake_cuda_streams import CudaStreams
from support.hazards import Access

_FREE_SHARED, _MOST_THREADS, _MOST_ASIDE, _MOST_PARAMETERS = 48 << 10, 1024, 65535, 4096
_OUT_OF_MEMORY, _NOT_FOUND = 2, 500


class KernelPointer(NamedTuple):
    """An address in one of a kernel's parameters.

    Args:
        offset: offset of the address in the parameter, bytes.
        alignment: alignment with which the kernel reads the target, bytes.
        is_written: whether the kernel may write there.
    """

    offset: int
    alignment: int
    is_written: bool


class KernelParameter(NamedTuple):
    """One of a kernel's parameters.

    Args:
        nbytes: size, rounded up to eight.
        pointers: addresses in the parameter; those that are 0 are absent.
    """

    nbytes: int
    pointers: Sequence[KernelPointer]


class Kernels(Protocol):
    """The code of modules."""

    def parameters(self, image: bytes) -> Mapping[str, Sequence[KernelParameter]]:
        """Return the parameters of each kernel in a module."""

    def run(self, image: bytes, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: bytes) -> None:
        """Run a kernel whose parameters are stored one after another, as `launchKernel` has read them."""


@dataclass(eq=False)
class LoadedKernel:
    """A kernel of a module, and the shared memory that it may use."""

    device: int
    image: bytes
    name: str
    parameters: Sequence[KernelParameter]
    most_shared: int = _FREE_SHARED


@dataclass(eq=False)
class LoadedModule:
    """Code on a device."""

    device: int
    image: bytes


class FakeCuda(CudaStreams):
    """The modules `cupy.cuda.runtime` and `cupy.cuda.driver` of a machine with `num_devices` cards.

    Args:
        kernels: code of the modules.
        num_devices: number of cards.
        memory: bytes of each card.
        seed: seed of the order in which streams advance.

    Attributes:
        num_pageable: number of copies from or to host memory that was not page-locked, during which the host waits (CUDA runtime, API
            synchronization behavior).
        num_launches: number of kernels started.
    """

    memcpyDefault = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self, kernels: Kernels, *, num_devices: int = 1, memory: int = 1 << 34, seed: int = 0) -> None:
        super().__init__(num_devices, memory, seed)
        self.kernels = kernels
        self.num_pageable = self.num_launches = 0
        self.pinned: dict[int, int] = {}

    def reserve(self, nbytes: int) -> tuple[int, int]:
        """Return (status, address) of an allocation on the current device."""
        device = self.getDevice()
        self._look(device)
        self._unsafe("cuMemAlloc")
        if self.memGetInfo()[0] < nbytes:
            return _OUT_OF_MEMORY, 0
        with self.lock:
            address = self.devices[device].reserve(nbytes)
            self.reserved[address] = device, nbytes
        return 0, address

    def release(self, address: int) -> int:
        """Free memory; return the status."""
        self._unsafe("cuMemFree")
        with self.lock:
            if address not in self.reserved:
                self.refuse(f"{address:#x} is freed and was not reserved, or was freed before")
                return INVALID
            device, nbytes = self.reserved[address]
            self._unused(address, nbytes, "memory is freed")
            del self.reserved[address]
            self.devices[device].release(address)
        return 0

    def pin(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock host memory; return the status."""
        self._look(self.getDevice())
        self._unsafe("cuMemHostRegister")
        if flags & ~7 or nbytes <= 0:
            self.refuse(f"host memory is locked with flags of 0 to 7 and at least a byte, got {flags} and {nbytes}")
            return INVALID
        with self.lock:
            if any(begin < address + nbytes and address < begin + size for begin, size in self.pinned.items()):
                self.refuse("host memory is locked twice")
                return 712
            self.pinned[address] = nbytes
        return 0

    def unpin(self, address: int) -> int:
        """Unlock host memory; return the status."""
        self._unsafe("cuMemHostUnregister")
        with self.lock:
            if address not in self.pinned:
                self.refuse(f"host memory at {address:#x} is unlocked and was not locked from there")
                return 713
            self._unused(address, self.pinned.pop(address), "host memory is unlocked")
        return 0

    def _unused(self, address: int, nbytes: int, what: str) -> None:
        user = self.hazards.user_of(address, nbytes)
        if user is not None:
            self.refuse(f"{what} while {user} may use it")

    def free(self, address: int) -> None:
        """Accept free(0), which creates a context; refuse any other address."""
        self._unsafe("cudaFree")
        if address:
            raise self.refuse("memory must be freed by the driver, which has reserved it")
        self._look(self.getDevice())

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        """Copy late; host memory that is not page-locked is read at once, and written before the call returns, as in CUDA."""
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        if kind != self.memcpyDefault:
            raise self.refuse(f"copies are of kind {self.memcpyDefault}, for which the driver finds the memory itself, got {kind}")
        target, source, nbytes = self._number("an address", target), self._number("an address", source), self._number("a size", nbytes)
        if abs(target - source) < nbytes:
            raise self.refuse(f"ranges of a copy overlap: {nbytes} bytes from {source:#x} to {target:#x}")
        with self.lock:
            is_late = [self._is_late(address, nbytes) for address in (target, source)]
            accesses = Access(target, nbytes, True), Access(source, nbytes, False)
            if is_late[1]:
                self.submit(stream, "a copy", accesses, lambda: ctypes.memmove(target, source, nbytes))
            else:
                saved = ctypes.string_at(source, nbytes)
                self.submit(stream, "a copy", accesses[:1], lambda: ctypes.memmove(target, saved, nbytes))
        if not is_late[0] and queue.recorded is None:
            self.streamSynchronize(stream)

    def _is_late(self, address: int, nbytes: int) -> bool:
        """Return whether memory is a device's or page-locked, so that a copy of it may happen late."""
        if self.memory_at(address, nbytes, "a copy") is not None:
            return True
        for begin, size in self.pinned.items():
            if begin < address + nbytes and address < begin + size:
                if address < begin or address + nbytes > begin + size:
                    raise self.refuse("a copy reaches beyond a piece of locked host memory")
                return True
        self.num_pageable += 1
        return False

    def moduleLoadData(self, image: bytes) -> int:
        """Load code for the current device."""
        self._unsafe("cuModuleLoadData")
        if not isinstance(image, bytes):
            raise self.refuse(f"code is bytes, got {type(image).__name__}")
        return self._keep(LoadedModule(self.getDevice(), image))

    def moduleGetFunction(self, module: int, name: str) -> int:
        """Return a kernel of a module."""
        found: LoadedModule = self._of(LoadedModule, module, "a module")
        parameters = self.kernels.parameters(found.image).get(name)
        if parameters is None:
            raise self.refuse(f"the module has no kernel {name}", _NOT_FOUND)
        return self._keep(LoadedKernel(found.device, found.image, name, parameters))

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        """Allow a kernel more shared memory; the last call counts."""
        found: LoadedKernel = self._of(LoadedKernel, function, "a kernel")
        if attribute != self.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES or not 0 <= value <= MOST_SHARED:
            raise self.refuse(f"shared memory is attribute 8 and at most {MOST_SHARED}, got {attribute} and {value}")
        found.most_shared = value

    def launchKernel(
        self, function: int, x: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int, stream: int, arguments: int, extra: int
    ) -> None:
        """Put a kernel on a stream; its arguments are copied now."""
        kernel: LoadedKernel = self._of(LoadedKernel, function, "a kernel")
        queue: QueueOfWork = self._of(QueueOfWork, stream, "a stream")
        grid = tuple(self._number("blocks", extent, (1 << 31) - 1) for extent in (x, y, z))
        if not all(grid) or max(grid[1:]) > _MOST_ASIDE:
            raise self.refuse(f"a grid has 1 to 2^31 - 1 by 65535 by 65535 blocks, and {kernel.name} got {grid}")
        if not 1 <= threads * ty * tz <= _MOST_THREADS:
            raise self.refuse(f"a block has 1 to {_MOST_THREADS} threads, and {kernel.name} got {threads} x {ty} x {tz}")
        if shared > kernel.most_shared:
            raise self.refuse(f"{kernel.name} asks for {shared:,} bytes of shared memory and was allowed {kernel.most_shared:,}")
        if not kernel.device == queue.device == self.getDevice():
            text = f"{kernel.name} of device {kernel.device} starts on a stream of device {queue.device}, and the thread's is {self.getDevice()}"
            raise self.refuse(text, BAD_HANDLE)
        if not arguments or extra:
            raise self.refuse("arguments are given by their addresses")
        nbytes = sum(parameter.nbytes for parameter in kernel.parameters)
        if nbytes > _MOST_PARAMETERS:
            raise self.refuse(f"arguments are at most {_MOST_PARAMETERS:,} bytes, and {kernel.name} has {nbytes:,}")
        packed, accesses = self._arguments(kernel, arguments)
        self.num_launches += 1
        run, image, name = self.kernels.run, kernel.image, kernel.name
        self.submit(stream, name, accesses, lambda: run(image, name, (grid[0], grid[1], grid[2]), threads, shared, packed))

    def _arguments(self, function: LoadedKernel, arguments: int) -> tuple[bytes, list[Access]]:
        """Return a kernel's arguments one after another, and the accesses that its pointers mean."""
        accesses, packed = [], b""
        slots = (ctypes.c_uint64 * len(function.parameters)).from_address(arguments)
        for position, (parameter, slot) in enumerate(zip(function.parameters, slots, strict=True)):
            value = ctypes.string_at(slot, parameter.nbytes)
            packed += value
            name = f"argument {position} of {function.name}"
            for pointer in parameter.pointers:
                address = int.from_bytes(value[pointer.offset : pointer.offset + 8], "little")
                if not address:
                    continue
                if address % pointer.alignment:
                    raise self.refuse(f"{name} is read in units of {pointer.alignment} bytes and begins at {address:#x}", 716)
                if self.memory_at(address, 1, name) is None:
                    raise self.refuse(f"{name} points to no memory of a device", 700)
                accesses.append(Access(address, 1, pointer.is_written))
        return packed, accesses


class CFunction:
    """A function of a C library as ctypes has it; without declared types it is refused.

    Args:
        expected: types of its arguments.
    """

    def __init__(self, cuda: FakeCuda, name: str, expected: Sequence[Any], run: Callable[..., int]) -> None:
        self.argtypes: Sequence[Any] | None = None
        self.restype: Any = None
        self._cuda, self._name, self._expected, self._run = cuda, name, list(expected), run

    def __call__(self, *arguments: Any) -> int:
        if self.restype is not ctypes.c_int:
            raise self._cuda.refuse(f"{self._name} returns an int, declared is {self.restype}")
        if self.argtypes is None or [self._kind(one) for one in self.argtypes] != [self._kind(one) for one in self._expected]:
            raise self._cuda.refuse(f"{self._name} takes {self._expected}, declared are {self.argtypes}")
        if len(arguments) != len(self.argtypes):
            raise self._cuda.refuse(f"{self._name} takes {len(self.argtypes)} arguments, got {len(arguments)}")
        values = []
        for kind, argument in zip(self.argtypes, arguments, strict=True):
            try:
                kind.from_param(argument)
            except (TypeError, ctypes.ArgumentError):
                raise self._cuda.refuse(f"{self._name} takes a {kind.__name__}, got {argument!r}") from None
            values.append(self._value(argument))
        return self._run(*values)

    @staticmethod
    def _kind(argtype: Any) -> tuple[int, bool]:
        return ctypes.sizeof(argtype), argtype in (ctypes.c_float, ctypes.c_double)

    @staticmethod
    def _value(argument: Any) -> Any:
        target = getattr(argument, "_obj", argument)
        if target is not argument:
            return target  # of byref: what it refers to
        return getattr(argument, "value", argument) or 0
