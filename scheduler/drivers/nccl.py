"""What is asked of NCCL: communicators of two ranks, over which one program sends what is in its GPU's memory to another's; CuPy carries that out.

A communicator belongs to one thread. What it sends and receives is put on a stream and matched in order: the n-th send with the n-th receive. A
kernel then waits on the device for the other side, so a stream may stand still for as long as the peer does, and only `abort` ends that. NCCL allows
no two ranks of a communicator on one GPU.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from .cuda_cupy import INSTALL, CupyGpu, GpuFacts, NoGpu
from .gpu import Gpu, Stream

INSTALL_NCCL: Final = "pip install 'nvidia-nccl-cu12>=2.19,<3' for CUDA 12, or 'nvidia-nccl-cu13>=2.19,<3' for CUDA 13"

OLDEST_CUPY: Final = 14
"""Its first version of which ids are bytes; they were tuples of numbers with signs before."""

UniqueId = bytes
"""What both ranks of a communicator know, and nobody else."""


class Communicator(Protocol):
    """One of two ranks. After an error nothing but `abort` may be called."""

    def send(self, address: int, nbytes: int, stream: Stream) -> None:
        """Put on the stream: bytes of this GPU go to the other rank."""

    def receive(self, address: int, nbytes: int, stream: Stream) -> None:
        """Put on the stream: bytes that the other rank sends come to this address."""

    def check(self) -> None:
        """Look for what has gone wrong since the last call.

        Raises:
            Exception: the network failed, or the other rank is gone; what is on the stream may never end.
        """

    def abort(self) -> None:
        """End it; what is on the stream ends at once, whether bytes have come or not. Idempotent."""


class Nccl(Protocol):
    """NCCL for one GPU."""

    @property
    def card(self) -> str:
        """What tells this GPU from others of the same machine."""

    def gpu(self) -> Gpu:
        """A handle of that GPU for memory and streams, not shared with anybody."""

    def free_nbytes(self) -> int:
        """Bytes of that GPU's memory that nobody has taken."""

    def unique_id(self) -> UniqueId:
        """A new one."""

    def join(self, unique_id: UniqueId, rank: int) -> Communicator:
        """Become rank 0 or 1 of a communicator on the GPU that the calling thread has adopted; returns when the other rank has joined, too.

        Raises:
            Exception: the network failed, or the other rank is gone.
        """


class CupyCommunicator:
    """One of two ranks.

    Args:
        library: `cupy.cuda.nccl`.
        own: its `NcclCommunicator`.
        peer: the other rank.
    """

    def __init__(self, library: Any, own: Any, peer: int) -> None:
        self._byte, self._own, self._peer = library.NCCL_UINT8, own, peer

    def send(self, address: int, nbytes: int, stream: Stream) -> None:
        """Send."""
        self._own.send(address, nbytes, self._byte, self._peer, stream.number)  # type: ignore[attr-defined]

    def receive(self, address: int, nbytes: int, stream: Stream) -> None:
        """Receive."""
        self._own.recv(address, nbytes, self._byte, self._peer, stream.number)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Look for errors."""
        self._own.check_async_error()

    def abort(self) -> None:
        """End it."""
        self._own.abort()


class CupyNccl:
    """NCCL for one GPU.

    Args:
        facts: of the GPU.

    Raises:
        NoGpu: CuPy finds no NCCL.
    """

    def __init__(self, facts: GpuFacts) -> None:
        from cupy.cuda import runtime

        self._facts, self._cuda = facts, runtime
        self._library = find_library()
        self.card = str(runtime.deviceGetPCIBusId(facts.index))

    def gpu(self) -> Gpu:
        """The GPU."""
        return CupyGpu(self._facts)

    def free_nbytes(self) -> int:
        """As CUDA says."""
        before = self._cuda.getDevice()
        self._cuda.setDevice(self._facts.index)
        try:
            return int(self._cuda.memGetInfo()[0])
        finally:
            self._cuda.setDevice(before)

    def unique_id(self) -> UniqueId:
        """A new one."""
        return bytes(self._library.get_unique_id())

    def join(self, unique_id: UniqueId, rank: int) -> Communicator:
        """Join."""
        return CupyCommunicator(self._library, self._library.NcclCommunicator(2, unique_id, rank), 1 - rank)


def find_library() -> Any:
    """`cupy.cuda.nccl`, which CuPy 14 replaces by nothing but `available = False` where libnccl.so.2 is not to be found.

    Raises:
        NoGpu: it is not to be found, or CuPy is older.
    """
    import cupy

    if int(cupy.__version__.partition(".")[0]) < OLDEST_CUPY:
        raise NoGpu(f"NCCL is used through CuPy {OLDEST_CUPY} or newer, and {cupy.__version__} is installed; {INSTALL}, or use --transport dask")
    try:
        from cupy.cuda import nccl
    except ImportError:
        nccl = None
    if not getattr(nccl, "available", False):
        raise NoGpu(f"CuPy finds no NCCL (libnccl.so.2) to send over; {INSTALL_NCCL}, or use --transport dask")
    return nccl
