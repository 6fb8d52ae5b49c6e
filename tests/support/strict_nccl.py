"""NCCL as CuPy 14 has it, between threads of one process: bytes move as between `fake_nccl.FakeNetwork`'s ranks, and what NCCL refuses is
refused (NCCL user guide: communicators, point-to-point, types).
"""

from __future__ import annotations

import threading
from typing import Any

from support.fake_cuda import FakeCuda
from support.fake_nccl import FakeCommunicator, FakeNetwork, _Pair
from support.hazards import Access

ID_NBYTES = 128
UINT8 = 1
"""ncclUint8."""


class StrictNccl:
    """`cupy.cuda.nccl`.

    Args:
        cuda: the runtime, whose streams and memory it uses.
    """

    available = True
    NCCL_UINT8 = UINT8

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.network = cuda, FakeNetwork()
        self.joined = threading.Condition()
        self.pairs: dict[bytes, dict[int, Any]] = {}
        self.NcclCommunicator = lambda count, unique_id, rank: StrictCommunicator(self, count, unique_id, rank)

    def get_unique_id(self) -> bytes:
        """Of a new communicator."""
        with self.joined:
            found = (len(self.pairs) + 1).to_bytes(ID_NBYTES, "big")
            self.pairs[found] = {}
            return found

    def get_version(self) -> int:
        """Of NCCL."""
        return 22800


class StrictCommunicator:
    """A rank of two, on the device that was current when it joined."""

    def __init__(self, library: StrictNccl, count: int, unique_id: bytes, rank: int) -> None:
        cuda = self._cuda = library.cuda
        if not isinstance(unique_id, bytes) or len(unique_id) != ID_NBYTES or unique_id not in library.pairs:
            raise cuda.refuse(f"a unique id is {ID_NBYTES} bytes that NCCL has made, got {unique_id!r}")
        if count != 2 or rank not in (0, 1):
            raise cuda.refuse(f"a communicator of two has the ranks 0 and 1, got {count} and {rank}")
        self._rank, self._device = rank, cuda.getDevice()
        with library.joined:
            ranks = library.pairs[unique_id]
            if rank in ranks:
                raise cuda.refuse(f"rank {rank} joins twice")
            if self._device in (each[0] for key, each in ranks.items() if isinstance(key, int)):
                raise cuda.refuse(f"two ranks of a communicator are on device {self._device}")
            pair = next((each[1] for each in ranks.values()), None) or _Pair()
            ranks[rank] = self._device, pair
            library.joined.notify_all()
            library.joined.wait_for(lambda: len(ranks) == 2)
        self._inner: FakeCommunicator | None = FakeCommunicator(library.network, pair, rank)

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        """Send bytes of this device."""
        self._queue(address, count, kind, peer, stream, is_sent=True)

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        """Receive bytes at an address of this device."""
        self._queue(address, count, kind, peer, stream, is_sent=False)

    def check_async_error(self) -> None:
        """Raise an error of the network."""
        self._open().check()

    def abort(self) -> None:
        """End what is under way; idempotent as CuPy's."""
        if self._inner is not None:
            self._inner.abort()
            self._inner = None

    def _open(self) -> FakeCommunicator:
        if self._inner is None:
            raise self._cuda.refuse("a communicator is used after it was aborted")
        return self._inner

    def _queue(self, address: int, count: int, kind: int, peer: int, stream: int, *, is_sent: bool) -> None:
        inner, cuda = self._open(), self._cuda
        if kind != UINT8 or peer != 1 - self._rank:
            raise cuda.refuse(f"bytes are of type {UINT8} and go to rank {1 - self._rank}, got {kind} and {peer}")
        if cuda.memory_at(address, count, "a transfer") != self._device:
            raise cuda.refuse(f"{count} bytes at {address:#x} are no memory of device {self._device}")
        if cuda.getDevice() != self._device:
            raise cuda.refuse(f"a communicator of device {self._device} is used while device {cuda.getDevice()} is current")
        queue = cuda.queue(stream)
        if queue.device != self._device:
            raise cuda.refuse(f"a communicator of device {self._device} is used on a stream of device {queue.device}")
        cuda.submit(stream, "a transfer", [Access(address, count, not is_sent)], lambda: None)
        (inner.send if is_sent else inner.receive)(address, count, queue.steps)
