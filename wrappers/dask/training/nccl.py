"""Bytes of buckets over NCCL; the messages of `exchange` request, announce and confirm the buckets, as without NCCL.

Every ordered pair of nodes has a communicator of its own, so its transfers have one order, that of the messages, which both ends know. On each end
one thread alone, an `NcclLink`, calls it. Tiles are in RAM and pass through a staging buffer in the GPU's memory in pieces: while one half of the
buffer is sent, the next piece is copied to the other half; the receiver works the other way round. If RAM is not page-locked, a copy call returns
only when all earlier work on its stream has ended, so copies never follow work that waits for a peer.

A kernel of NCCL waits on the device for the peer's kernel, and NCCL's guide warns of concurrent communicators: a CUDA call that synchronises the
whole device then waits for the peer, which may wait in the same way. Making connections takes such calls. So every communicator is joined before any
moves a byte, and each moves its first piece alone, in one order on all nodes, before a step begins. A remaining deadlock ends like any hang: the
client notices a step without end, communicators are aborted, and their kernels end.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np

from nntask import ClusterError, DoesNotFit, UsageError
from nntask.config import check_plain, format_size
from nntask.hardware import GpuPlan, open_nccl
from scheduler.drivers import Event, Gpu, Nccl, UniqueId

from .transports import Channel, Tiles, bytes_of, check_nbytes, nbytes_of

PIECE: Final = 2 << 20
"""Largest transfer in bytes; the staging buffer of a link holds two in the GPU's memory."""

STOP_SECONDS: Final = 20.0
"""Time limit for a link to end; a link that NCCL still blocks then is abandoned."""

_SHORTEST: Final = 50e-6
_LONGEST: Final = 1e-3
"""Shortest (first) and longest pause between two polls of a transfer; seconds."""

_Job = tuple[Tiles, Callable[[], None] | None]


class _Half(NamedTuple):
    """One half of the staging buffer: its address, and the events of its last copy and of its last transfer."""

    address: int
    copied: Event
    passed: Event


class StagingBuffers:
    """Resources of a link on the GPU: a buffer of two halves, a stream for copies, and a stream for transfers that wait for the peer.

    They are made before there is a peer, so that their failure is not taken for the peer's.

    Raises:
        MemoryError: the GPU has fewer free bytes.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.copies, self.network = gpu.stream(), gpu.stream()
        events = [gpu.event() for _ in range(4)]
        self._buffer = gpu.reserve(2 * PIECE)
        self.halves = [_Half(self._buffer, *events[:2]), _Half(self._buffer + PIECE, *events[2:])]

    def close(self) -> None:
        """Free the buffer."""
        self.gpu.release(self._buffer)


class _Piece(NamedTuple):
    """Host memory that fits one half, as (address, bytes); the tiles it belongs to, which it keeps alive; and a callback if it is their last
    piece."""

    spans: Sequence[tuple[int, int]]
    tiles: Tiles
    over: Callable[[], None] | None

    @property
    def nbytes(self) -> int:
        """Bytes of all spans."""
        return sum(nbytes for _, nbytes in self.spans)


class NcclLink(threading.Thread):
    """One direction between this node and a peer; created by the thread of the event loop.

    Args:
        nccl: NCCL on this node's GPU.
        staging: GPU resources of this link, which frees them at its end.
        unique_id: unique id of the communicator.
        is_sender: whether this end sends (rank 0) or receives (rank 1).
        name: name of the thread.

    Attributes:
        joined: done when the peer's end has joined.
        ended: done when the thread will not touch a tile any more; its result is the error that ended it, None after `stop`.
    """

    def __init__(self, nccl: Nccl, staging: StagingBuffers, unique_id: UniqueId, is_sender: bool, name: str) -> None:
        super().__init__(name=f"nntask {name}", daemon=True)
        self._nccl, self._staging, self._id, self._is_sender = nccl, staging, unique_id, is_sender
        self._copies, self._network, self._free = staging.copies, staging.network, deque(staging.halves)
        self._loop = asyncio.get_running_loop()
        self.joined: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._is_over = False
        self._ahead: deque[_Piece] = deque()  # pieces not begun
        self._under_way: deque[tuple[_Half, _Piece]] = deque()

    def put(self, tiles: Tiles, over: Callable[[], None] | None = None) -> None:
        """Send tiles, or receive into them; then calls `over` on the event loop's thread, in the order of the calls."""
        self._jobs.put((tiles, over))
        if self._is_over:  # tested after the put: at least one of the two threads sees the other
            self._forget()

    def _forget(self) -> None:
        """Drop tiles that will never be transferred."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()

    def stop(self) -> None:
        """End the thread, with unfinished transfers; callable from any thread."""
        self._stopping.set()
        self._jobs.put(None)

    def run(self) -> None:
        """Transfer tiles until `stop` or an error."""
        error: BaseException | None = None
        try:
            self._open_and_transfer()
        except BaseException as failure:  # any error of NCCL, CUDA or CuPy: no waiting task may hang
            error = failure.with_traceback(None)  # its frames refer to tiles, and so do those of its causes
            error.__cause__ = error.__context__ = None
        self._ahead.clear()
        self._under_way.clear()
        self._is_over = True
        self._forget()
        self._post(_resolve, self.ended, error)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            self._loop.call_soon_threadsafe(function, *args)

    def _open_and_transfer(self) -> None:
        with ExitStack() as at_the_end:
            at_the_end.callback(self._staging.close)
            self._staging.gpu.adopt()
            self._communicator = self._nccl.join(self._id, 0 if self._is_sender else 1)
            at_the_end.callback(self._abort)
            self._post(_resolve, self.joined, None)
            self._transfer()

    def _abort(self) -> None:
        """Abort the communicator, and wait until both streams are idle."""
        self._communicator.abort()
        for stream in (self._network, self._copies):
            event = self._staging.gpu.event()
            stream.record(event)
            event.wait()

    def _transfer(self) -> None:
        """Transfer tiles until `stop`."""
        while True:
            if self._ahead and self._free:
                self._under_way.append((self._free.popleft(), self._ahead.popleft()))
                self._start(*self._under_way[-1])
            elif self._ahead or (self._under_way and self._jobs.empty()):
                if self._wait_passed(self._under_way[0][0]):
                    self._finish(*self._under_way[0])
                    self._free.append(self._under_way.popleft()[0])
                elif self._stopping.is_set():
                    return
            else:
                job = self._jobs.get()
                if job is None or self._stopping.is_set():
                    return
                tiles, over = job
                cut = list(pieces_of(tiles, PIECE)) or [[]]  # an empty list of tiles has one empty piece
                self._ahead += [_Piece(spans, tiles, over if number == len(cut) else None) for number, spans in enumerate(cut, 1)]

    def _start(self, half: _Half, piece: _Piece) -> None:
        """Begin to send or receive a piece through a free half."""
        if self._is_sender:
            self._copy(half, piece)
            self._network.hold(half.copied)
            if piece.spans:
                self._communicator.send(half.address, piece.nbytes, self._network)
        elif piece.spans:
            self._communicator.receive(half.address, piece.nbytes, self._network)
        self._network.record(half.passed)

    def _wait_passed(self, half: _Half) -> bool:
        """Wait until the transfer of a half has ended; False if there is other work first, or the link is stopping.

        Raises:
            Exception: the communicator is broken; work on its stream may never end.
        """
        pause = _SHORTEST
        while not half.passed.is_done():
            self._communicator.check()
            if self._stopping.wait(pause) or not (self._ahead or self._jobs.empty()):
                return False
            pause = min(2 * pause, _LONGEST)
        return True

    def _finish(self, half: _Half, piece: _Piece) -> None:
        """Complete a transferred piece: copy a received one to its tiles, and call its callback."""
        if not self._is_sender:
            self._copy(half, piece)
            half.copied.wait()
        if piece.over is not None:
            self._post(piece.over)

    def _copy(self, half: _Half, piece: _Piece) -> None:
        """Put copies between RAM and a half on the stream of copies, which never waits for the peer."""
        staged = half.address
        for address, nbytes in piece.spans:
            target, source = (staged, address) if self._is_sender else (address, staged)
            self._copies.copy(target, source, nbytes)
            staged += nbytes
        self._copies.record(half.copied)


class NcclChannel:
    """`transports.Channel` over two links.

    Args:
        sender, receiver: the links.
        fail: called once with the error of a link that ends by itself.
    """

    is_beside = True

    def __init__(self, sender: NcclLink, receiver: NcclLink, fail: Callable[[BaseException], None]) -> None:
        self._sender, self._receiver = sender, receiver
        for link in (sender, receiver):
            link.ended.add_done_callback(partial(self._note_end, fail))

    def _note_end(self, fail: Callable[[BaseException], None], ended: asyncio.Future[BaseException | None]) -> None:
        error = ended.result()
        if error is not None:
            fail(error)

    def put(self, tiles: Tiles) -> int:
        """Begin to send; returns the number of bytes for the message."""
        self._sender.put(tiles)
        return nbytes_of(tiles)

    def take(self, said: int, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Begin to receive."""
        check_nbytes(said, tiles)
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


class NcclTransport:
    """`transports.ByteTransport` over NCCL. Its constructor may block.

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

    def __init__(self, nccl: Nccl, rank: int, num_nodes: int, worker: str = "") -> None:
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
            yield self._other(pair), _reached(link, link.joined)
        for pair in sorted(self._links, key=lambda pair: ((pair[1] - pair[0]) % self._num_nodes, pair)):
            yield self._other(pair), _first_piece(self._links[pair])

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
        needed = format_size(2 * (num_nodes - 1) * 2 * PIECE)
        raise DoesNotFit(
            f"on worker {worker} --transport nccl takes {needed} of the GPU for buffers, and {error}; lower --nodes, or use --transport dask"
        ) from error
    except RuntimeError as error:  # an error of CUDA or NCCL
        raise _cannot_begin(worker, error) from error


def _cannot_begin(worker: str, error: RuntimeError) -> ClusterError:
    """Return the error of CUDA or NCCL on a node before any peer is involved."""
    return ClusterError(
        f"--transport nccl cannot begin on worker {worker} ({error}); see what it says there with NCCL_DEBUG=WARN, or use --transport dask"
    )


def pieces_of(tiles: Tiles, size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the memory of tiles, one after another, in pieces of `size` bytes and a remainder; a piece is a list of (address, bytes)."""
    piece: list[tuple[int, int]] = []
    left = size
    for tile in tiles:
        flat = bytes_of(tile)
        address, rest = flat.ctypes.data, flat.nbytes
        while rest:
            nbytes = min(rest, left)
            piece.append((address, nbytes))
            address, rest, left = address + nbytes, rest - nbytes, left - nbytes
            if not left:
                yield piece
                piece, left = [], size
    if piece:
        yield piece


async def _reached(link: NcclLink, goal: asyncio.Future[None]) -> None:
    """Wait for an event of a link.

    Raises:
        Exception: the link ended before.
    """
    await asyncio.wait((goal, link.ended), return_when=asyncio.FIRST_COMPLETED)
    if not goal.done():
        raise link.ended.result() or OSError("its connection was closed")


async def _first_piece(link: NcclLink) -> None:
    """Transfer one dummy piece, which makes NCCL connect."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    link.put([np.zeros(PIECE, np.uint8)], partial(_resolve, over, None))
    await _reached(link, over)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not future.done():
        future.set_result(result)
