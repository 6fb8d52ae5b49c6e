"""The interface of NCCL: communicators of two ranks, over which one process sends bytes of its GPU's memory to another's. CuPy implements it.

A communicator belongs to one thread. Its sends and receives are put on a stream and matched in order, the n-th send with the n-th receive. A kernel
then waits on the device for the other rank, so a stream may stall as long as the peer does, and only `abort` ends that. NCCL does not allow two ranks
of a communicator on one GPU.
"""

from __future__ import annotations

from typing import Any, Final

from .cuda_cupy import INSTALL, CupyGpu, GpuFacts, device_of_thread
from .gpu import Gpu, NoGpu, Stream

INSTALL_NCCL: Final = "pip install -e '.[nccl13]' for CUDA 13, or '.[nccl12]' for CUDA 12"

OLDEST_CUPY: Final = 14
"""First version of CuPy whose unique ids are bytes."""

UniqueId = bytes
"""Secret that both ranks of a communicator share."""


class CupyCommunicator:
    """One of two ranks, through CuPy. After an error only `abort` may be called.

    Args:
        library: the module `cupy.cuda.nccl`.
        own: the `NcclCommunicator` to use.
        peer: number of the other rank.
    """

    def __init__(self, library: Any, own: Any, peer: int) -> None:
        self._byte, self._own, self._peer = library.NCCL_UINT8, own, peer

    def send(self, address: int, nbytes: int, stream: Stream) -> None:
        """Send bytes of this GPU to the other rank, in the order of the stream."""
        self._own.send(address, nbytes, self._byte, self._peer, stream.number)  # type: ignore[attr-defined]

    def receive(self, address: int, nbytes: int, stream: Stream) -> None:
        """Receive bytes of the other rank at an address, in the order of the stream."""
        self._own.recv(address, nbytes, self._byte, self._peer, stream.number)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Check for asynchronous errors since the last call.

        Raises:
            Exception: the network failed, or the other rank is gone; work on the stream may never end.
        """
        self._own.check_async_error()

    def abort(self) -> None:
        """End the communicator; its work on streams ends at once, whether bytes have arrived or not. Idempotent."""
        self._own.abort()


class CupyNccl:
    """NCCL for one GPU, through CuPy.

    Args:
        facts: properties of the GPU.

    Attributes:
        card: identifier of this GPU that no other GPU of the machine has.

    Raises:
        NoGpu: CuPy finds no NCCL.
    """

    def __init__(self, facts: GpuFacts) -> None:
        from cupy.cuda import runtime

        self._facts, self._cuda = facts, runtime
        self._library = find_library()
        self.card = str(runtime.deviceGetPCIBusId(facts.index))

    def gpu(self) -> Gpu:
        """Return a `Gpu` of this GPU whose memory and streams no other code shares."""
        return CupyGpu(self._facts)

    def free_nbytes(self) -> int:
        """Return the free bytes of the GPU's memory according to CUDA."""
        with device_of_thread(self._cuda, self._facts.index):
            return int(self._cuda.memGetInfo()[0])

    def unique_id(self) -> UniqueId:
        """Return a new unique id."""
        return bytes(self._library.get_unique_id())

    def join(self, unique_id: UniqueId, rank: int) -> CupyCommunicator:
        """Join a communicator as rank 0 or 1, on the GPU that the calling thread has adopted; returns when the other rank has joined, too.

        Raises:
            Exception: the network failed, or the other rank is gone.
        """
        return CupyCommunicator(self._library, self._library.NcclCommunicator(2, unique_id, rank), 1 - rank)


def find_library() -> Any:
    """Return the module `cupy.cuda.nccl`. If CuPy 14 does not find libnccl.so.2, it provides a stub with `available = False` instead.

    Raises:
        NoGpu: libnccl.so.2 is not found, or CuPy is older than 14.
    """
    import cupy

    if int(cupy.__version__.partition(".")[0]) < OLDEST_CUPY:
        raise NoGpu(f"NCCL is used through CuPy {OLDEST_CUPY} or newer, and {cupy.__version__} is installed", INSTALL)
    try:
        from cupy.cuda import nccl
    except ImportError:
        nccl = None
    if not getattr(nccl, "available", False):
        raise NoGpu("CuPy finds no NCCL (libnccl.so.2) to send over", INSTALL_NCCL)
    return nccl
