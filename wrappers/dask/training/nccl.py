"""Bytes of buckets over NCCL; the messages of `exchange` request, announce and confirm the buckets, as without NCCL.

Every ordered pair of nodes has a communicator of its own (`nccl_link`), so its transfers have one order, that of the messages, which both ends know.
A kernel of NCCL waits on the device for the peer's kernel, and NCCL's guide warns of concurrent communicators: a CUDA call that synchronises the
whole device then waits for the peer, which may wait in the same way. Connecting makes such calls. So every communicator is joined before any moves a
byte, and each moves its first piece alone, in one order on all nodes, before a step begins. A remaining deadlock ends like any hang: the client
notices a step without end, communicators are aborted, and their kernels end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Final

from nntask import ClusterError, DoesNotFit, UsageError
from nntask.config import check_plain
from nntask.hardware import GpuPlan, open_nccl
from nntask.io import format_size
from scheduler import DoesNotFit as NoRoom
from scheduler import Shortage
from scheduler.drivers import CupyNccl, UniqueId

from .nccl_link import PIECE, NcclLink, StagingBuffers, move_first_piece, reached
from .transports import ByteTransport, Channel, Tiles, check_nbytes, nbytes_of

STOP_SECONDS: Final = 20.0
"""Time limit for a link to end; a link that NCCL still blocks then is abandoned."""


class NcclChannel(Channel):
    """A channel over two links.

    Args:
        sender, receiver: the links.
        fail: called once with the error of a link that ends by itself.
    """

    is_separate = True

    def __init__(self, sender: NcclLink, receiver: NcclLink, fail: Callable[[BaseException], None]) -> None:
        self._sender, self._receiver = sender, receiver
        for link in (sender, receiver):
            link.ended.add_done_callback(partial(self._note_end, fail))

    def _note_end(self, fail: Callable[[BaseException], None], ended: asyncio.Future[BaseException | None]) -> None:
        error = ended.result()
        if error is not None:
            fail(error)

    def put(self, tiles: Tiles) -> int:
        """Begin to send; return the number of bytes for the message."""
        self._sender.put(tiles)
        return nbytes_of(tiles)

    def take(self, content: int, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Begin to receive."""
        check_nbytes(content, tiles)
        self._receiver.put(tiles, arrived)

    def stop(self, stopped: Callable[[], None]) -> None:
        """Abort both links; `stopped` is called when both have ended, or after `STOP_SECONDS` if NCCL still blocks one."""
        links = (self._sender, self._receiver)
        for link in links:
            link.stop()
        timer = asyncio.get_running_loop().call_later(STOP_SECONDS, stopped)

        def end(_: object) -> None:
            timer.cancel()
            stopped()

        asyncio.gather(*(link.ended for link in links)).add_done_callback(end)


class NcclTransport(ByteTransport):
    """Channels over NCCL. The constructor may block.

    Args:
        nccl: NCCL on this node's GPU.
        rank: rank of the node.
        num_nodes: number of nodes of the training.
        worker: address of the node's worker, for messages.

    Attributes:
        card: identifier of the GPU on its machine.

    Raises:
        MemoryError: the GPU has too few free bytes for the buffers of all links.
    """

    def __init__(self, nccl: CupyNccl, rank: int, num_nodes: int, worker: str = "") -> None:
        self._nccl, self._rank, self._num_nodes, self._worker = nccl, rank, num_nodes, worker
        self.num_steps, self.card = 4 * (num_nodes - 1), nccl.card
        self._free = nccl.free_nbytes()
        self._buffers: list[StagingBuffers] = []  # of links to come
        with ExitStack() as if_one_fails:
            for _ in range(2 * (num_nodes - 1)):
                self._buffers.append(StagingBuffers(nccl.gpu()))
                if_one_fails.callback(self._buffers[-1].close)
            if_one_fails.pop_all()
        self._ids: dict[int, UniqueId] = {}
        self._links: dict[tuple[int, int], NcclLink] = {}  # by (sender, receiver)

    def taken_nbytes(self) -> int:
        """Return the measured bytes of the GPU's memory that buffers and NCCL have taken since construction."""
        return max(self._free - self._nccl.free_nbytes(), 0)

    def hello(self, rank: int) -> UniqueId:
        """Return the unique id of the communicator with which this node sends to a peer; NCCL listens for the peer from now on.

        Raises:
            ClusterError: NCCL failed.
        """
        if rank not in self._ids:
            try:
                self._ids[rank] = self._nccl.unique_id()
            except RuntimeError as error:
                raise _cannot_begin(self._worker, error) from error
        return self._ids[rank]

    def open_channel(self, rank: int, theirs: UniqueId, fail: Callable[[BaseException], None]) -> Channel:
        """Begin to join both communicators of a peer."""
        sender = NcclLink(self._nccl, self._buffers.pop(), self._ids[rank], True, f"to node {rank}")
        receiver = NcclLink(self._nccl, self._buffers.pop(), theirs, False, f"from node {rank}")
        self._links[self._rank, rank], self._links[rank, self._rank] = sender, receiver
        channel = NcclChannel(sender, receiver, fail)
        sender.start()
        receiver.start()
        return channel

    def steps(self) -> Iterator[tuple[int, Awaitable[None]]]:
        """Join all communicators, then move a piece over each: first from each node to the next one, then to the one after that, and so on."""
        for pair, link in self._links.items():
            yield self._other(pair), reached(link, link.joined)
        for pair in sorted(self._links, key=lambda pair: ((pair[1] - pair[0]) % self._num_nodes, pair)):
            yield self._other(pair), move_first_piece(self._links[pair])

    def _other(self, pair: tuple[int, int]) -> int:
        return pair[0] if pair[1] == self._rank else pair[1]

    def close(self) -> None:
        """Abort all links, and wait for their threads for at most `STOP_SECONDS`."""
        for link in self._links.values():
            link.stop()
        deadline = monotonic() + STOP_SECONDS
        for link in self._links.values():
            link.join(max(deadline - monotonic(), 0))
        while self._buffers:
            self._buffers.pop().close()


def open_nccl_transport(gpus: GpuPlan, worker: str, rank: int, num_nodes: int) -> NcclTransport:
    """Return the transport of a node for --transport nccl.

    Args:
        gpus: GPUs of the run.
        worker: address of the node's Dask worker.
        rank: rank of the node.
        num_nodes: number of nodes of the training.

    Raises:
        UsageError: the node has no GPU, or no NCCL, or its cluster encrypts.
        DoesNotFit: its GPU has too little memory.
        ClusterError: CUDA or NCCL failed.
    """
    check_plain(worker)
    try:
        return NcclTransport(open_nccl(gpus), rank, num_nodes, worker)
    except UsageError as error:
        raise UsageError(f"on worker {worker}: {error}") from error
    except MemoryError as error:
        needed, why = 2 * (num_nodes - 1) * 2 * PIECE, error.fact if isinstance(error, NoRoom) else str(error)
        raise DoesNotFit(
            f"on worker {worker} --transport nccl takes {format_size(needed)} of the GPU for buffers, and {why}",
            "lower --nodes, or use --transport dask",
            shortage=Shortage("outside", gpus.names[0], needed, gpus.nbytes, task="NCCL", detail=why),
        ) from error
    except RuntimeError as error:  # an error of CUDA or NCCL
        raise _cannot_begin(worker, error) from error


def _cannot_begin(worker: str, error: RuntimeError) -> ClusterError:
    """Return the error of CUDA or NCCL on a node before any peer is involved."""
    return ClusterError(
        f"--transport nccl cannot begin on worker {worker} ({error})", "see what it says there with NCCL_DEBUG=WARN, or use --transport dask"
    )
