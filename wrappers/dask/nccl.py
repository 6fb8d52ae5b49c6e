"""Bytes of buckets over NCCL, beside the messages of `exchange`, which say as always who wants what, what comes, and who has got what.

Every ordered pair of nodes has a communicator of its own, so what it carries has one order, that of the messages, and both ends know it. On each end
one thread, a `Link`, alone calls it. Tiles are in RAM and go through a buffer in the GPU's memory, in pieces: while one half of it is sent, the next
piece is copied to the other half; where bytes arrive it is the other way round. Where RAM is not locked in place, a call that copies comes back only
when what is in front of the copy on its stream has ended, so copies are never put behind what waits for a peer.

A kernel of NCCL waits on the device for the peer's, and NCCL's guide warns of several communicators at once: a CUDA call that waits for the whole
device then waits for the peer, which may wait for us in the same way. Making connections takes such calls, so every communicator is joined before any
carries a byte, and each carries its first piece alone, in one order on all nodes, before a step begins. What is left of the danger ends as any hang
does: the training's client notices a step without end, communicators are aborted, and their kernels end.
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

from nntask.errors import ClusterError, DoesNotFit, UsageError
from nntask.sizes import format_size
from nntask.trainer.cluster_rules import check_plain
from nntask.trainer.gpus import open_nccl
from nntask.trainer.settings import TrainSettings
from scheduler.drivers.gpu import Event, Gpu
from scheduler.drivers.nccl import Nccl, UniqueId

from .carriers import Carrier, Tiles, bytes_of, check_nbytes, nbytes_of

PIECE: Final = 2 << 20
"""Bytes that are sent at once, at most; a link has room for two in the GPU's memory."""

STOP_SECONDS: Final = 20.0
"""How long a link may take to end; if NCCL does not come back then, nobody waits for it any longer."""

_SHORTEST: Final = 50e-6
_LONGEST: Final = 1e-3
"""Pauses between two looks at whether a piece is through, the first and the last."""

_Job = tuple[Tiles, Callable[[], None] | None]


class _Half(NamedTuple):
    """One half of the buffer: where it is, and when it was last copied from or to, and sent or received."""

    address: int
    copied: Event
    passed: Event


class Room:
    """What a link needs of the GPU: a buffer of two halves, a stream for copies, and one for what waits for the peer.

    Made before there is a peer, so that what fails is not taken for a peer's fault.

    Raises:
        MemoryError: the GPU has less.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.copies, self.network = gpu.stream(), gpu.stream()
        events = [gpu.event() for _ in range(4)]
        self._buffer = gpu.reserve(2 * PIECE)
        self.halves = [_Half(self._buffer, *events[:2]), _Half(self._buffer + PIECE, *events[2:])]

    def close(self) -> None:
        """Give the buffer back."""
        self.gpu.release(self._buffer)


class _Piece(NamedTuple):
    """Host memory that fits a half, as (address, bytes), with the tiles it is of, which so stay there, and what to call if it is their last one."""

    spans: Sequence[tuple[int, int]]
    tiles: Tiles
    over: Callable[[], None] | None

    @property
    def nbytes(self) -> int:
        """Of all spans."""
        return sum(nbytes for _, nbytes in self.spans)


class Link(threading.Thread):
    """One way between this node and a peer. Made by the thread of the event loop.

    Args:
        nccl: of this node.
        room: which this link gives back at its end.
        unique_id: of the communicator.
        is_sender: whether this end sends (rank 0) or receives (rank 1).
        name: of the thread.

    Attributes:
        joined: done when the peer's end is there.
        ended: done when the thread will not touch a tile any more; its result is what went wrong, None after `stop`.
    """

    def __init__(self, nccl: Nccl, room: Room, unique_id: UniqueId, is_sender: bool, name: str) -> None:
        super().__init__(name=f"nntask {name}", daemon=True)
        self._nccl, self._room, self._id, self._is_sender = nccl, room, unique_id, is_sender
        self._copies, self._network, self._free = room.copies, room.network, deque(room.halves)
        self._loop = asyncio.get_running_loop()
        self.joined: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._is_over = False
        self._ahead: deque[_Piece] = deque()  # not begun
        self._under_way: deque[tuple[_Half, _Piece]] = deque()

    def put(self, tiles: Tiles, over: Callable[[], None] | None = None) -> None:
        """Send tiles, or fill them with what comes; calls `over` on the event loop's thread afterwards, in the order of the calls."""
        self._jobs.put((tiles, over))
        if self._is_over:  # looked at after the put: one of the two threads sees the other
            self._forget()

    def _forget(self) -> None:
        """Let go of tiles that will never be carried."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()

    def stop(self) -> None:
        """End the thread; what is under way ends where it is. Called by any thread."""
        self._stopping.set()
        self._jobs.put(None)

    def run(self) -> None:
        """Carry until told to stop, or until something breaks."""
        error: BaseException | None = None
        try:
            self._open_and_carry()
        except BaseException as failure:  # whatever NCCL, CUDA or CuPy raise: nobody may be left waiting
            error = failure.with_traceback(None)  # whose frames have tiles, as those of what came before it
            error.__cause__ = error.__context__ = None
        self._ahead.clear()
        self._under_way.clear()
        self._is_over = True
        self._forget()
        self._tell(_settle, self.ended, error)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _open_and_carry(self) -> None:
        with ExitStack() as at_the_end:
            at_the_end.callback(self._room.close)
            self._room.gpu.adopt()
            self._communicator = self._nccl.join(self._id, 0 if self._is_sender else 1)
            at_the_end.callback(self._drain)
            self._tell(_settle, self.joined, None)
            self._carry()

    def _drain(self) -> None:
        """End the communicator, and wait until its stream and that of copies stand still."""
        self._communicator.abort()
        for stream in (self._network, self._copies):
            event = self._room.gpu.event()
            stream.record(event)
            event.wait()

    def _carry(self) -> None:
        """Carry until told to stop."""
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
                cut = list(pieces_of(tiles, PIECE)) or [[]]  # nothing at all has its turn, too
                self._ahead += [_Piece(spans, tiles, over if number == len(cut) else None) for number, spans in enumerate(cut, 1)]

    def _start(self, half: _Half, piece: _Piece) -> None:
        """Begin to send or to receive a piece; nobody uses the half."""
        if self._is_sender:
            self._copy(half, piece)
            self._network.hold(half.copied)
            if piece.spans:
                self._communicator.send(half.address, piece.nbytes, self._network)
        elif piece.spans:
            self._communicator.receive(half.address, piece.nbytes, self._network)
        self._network.record(half.passed)

    def _wait_passed(self, half: _Half) -> bool:
        """Wait until what is in a half has been sent, or has come; False if there is something else to do before, or the link is told to stop.

        Raises:
            Exception: the communicator is broken; what is on its stream may never end.
        """
        pause = _SHORTEST
        while not half.passed.is_done():
            self._communicator.check()
            if self._stopping.wait(pause) or not (self._ahead or self._jobs.empty()):
                return False
            pause = min(2 * pause, _LONGEST)
        return True

    def _finish(self, half: _Half, piece: _Piece) -> None:
        """Bring a piece that has passed to where it belongs."""
        if not self._is_sender:
            self._copy(half, piece)
            half.copied.wait()
        if piece.over is not None:
            self._tell(piece.over)

    def _copy(self, half: _Half, piece: _Piece) -> None:
        """Put copies between RAM and a half on their stream, which holds nothing that waits for the peer."""
        staged = half.address
        for address, nbytes in piece.spans:
            target, source = (staged, address) if self._is_sender else (address, staged)
            self._copies.copy(target, source, nbytes)
            staged += nbytes
        self._copies.record(half.copied)


class NcclCarrier:
    """Bytes of one peer.

    Args:
        sender, receiver: the links.
        fail: called once if one of them ends by itself.
    """

    is_beside = True

    def __init__(self, sender: Link, receiver: Link, fail: Callable[[BaseException], None]) -> None:
        self._sender, self._receiver = sender, receiver
        for link in (sender, receiver):
            link.ended.add_done_callback(partial(self._note_end, fail))

    def _note_end(self, fail: Callable[[BaseException], None], ended: asyncio.Future[BaseException | None]) -> None:
        error = ended.result()
        if error is not None:
            fail(error)

    def put(self, tiles: Tiles) -> int:
        """Begin to send; the message says how many bytes."""
        self._sender.put(tiles)
        return nbytes_of(tiles)

    def take(self, said: int, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Begin to receive."""
        check_nbytes(said, tiles)
        self._receiver.put(tiles, arrived)

    def stop(self, stopped: Callable[[], None]) -> None:
        """Abort both ways; `stopped` is called when both have ended, and also when NCCL has not let go of them for `STOP_SECONDS`."""
        links = (self._sender, self._receiver)
        for link in links:
            link.stop()
        timer = asyncio.get_running_loop().call_later(STOP_SECONDS, stopped)

        def end(_: object) -> None:
            timer.cancel()
            stopped()

        asyncio.gather(*(link.ended for link in links)).add_done_callback(end)


class NcclCarriers:
    """The carriers of a node. Made by a thread that may wait.

    Args:
        nccl: of this node's GPU.
        rank: of the node.
        num_nodes: of the training.
        worker: address of the node's, for messages.

    Attributes:
        card: what tells the GPU from others of its machine.

    Raises:
        MemoryError: the GPU has too little for the buffers of all links.
    """

    def __init__(self, nccl: Nccl, rank: int, num_nodes: int, worker: str = "") -> None:
        self._nccl, self._rank, self._num_nodes, self._worker = nccl, rank, num_nodes, worker
        self.num_steps, self.card = 4 * (num_nodes - 1), nccl.card
        self._free = nccl.free_nbytes()
        self._rooms: list[Room] = []  # of links that there are not yet
        with ExitStack() as if_one_fails:
            for _ in range(2 * (num_nodes - 1)):
                self._rooms.append(Room(nccl.gpu()))
                if_one_fails.callback(self._rooms[-1].close)
            if_one_fails.pop_all()
        self._ids: dict[int, UniqueId] = {}
        self._links: dict[tuple[int, int], Link] = {}  # by (sender, receiver)

    def taken_nbytes(self) -> int:
        """Bytes of the GPU's memory that buffers and NCCL have taken since this was made, as measured."""
        return max(self._free - self._nccl.free_nbytes(), 0)

    def hello(self, rank: int) -> UniqueId:
        """The id of the communicator that this node sends with; NCCL listens for the peer from now on.

        Raises:
            ClusterError: NCCL failed.
        """
        if rank not in self._ids:
            try:
                self._ids[rank] = self._nccl.unique_id()
            except RuntimeError as error:
                raise _cannot_begin(self._worker, error) from error
        return self._ids[rank]

    def carrier(self, rank: int, theirs: UniqueId, fail: Callable[[BaseException], None]) -> Carrier:
        """Begin to join both communicators."""
        sender = Link(self._nccl, self._rooms.pop(), self._ids[rank], True, f"to node {rank}")
        receiver = Link(self._nccl, self._rooms.pop(), theirs, False, f"from node {rank}")
        self._links[self._rank, rank], self._links[rank, self._rank] = sender, receiver
        carrier = NcclCarrier(sender, receiver, fail)
        sender.start()
        receiver.start()
        return carrier

    def steps(self) -> Iterator[tuple[int, Awaitable[None]]]:
        """First all communicators are joined, then each carries a piece: those from a node to the next one first, then to the one after that."""
        for pair, link in self._links.items():
            yield self._other(pair), _reached(link, link.joined)
        for pair in sorted(self._links, key=lambda pair: ((pair[1] - pair[0]) % self._num_nodes, pair)):
            yield self._other(pair), _first_piece(self._links[pair])

    def _other(self, pair: tuple[int, int]) -> int:
        return pair[0] if pair[1] == self._rank else pair[1]

    def close(self) -> None:
        """Abort all, and wait for their threads for `STOP_SECONDS` at most."""
        for link in self._links.values():
            link.stop()
        deadline = monotonic() + STOP_SECONDS
        for link in self._links.values():
            link.join(max(deadline - monotonic(), 0))
        while self._rooms:
            self._rooms.pop().close()


def open_carriers(settings: TrainSettings, worker: str, rank: int, num_nodes: int) -> NcclCarriers:
    """The carriers of a node that is told --transport nccl.

    Args:
        worker: address of the Dask worker that it lives on.

    Raises:
        UsageError: it has no GPU, or no NCCL, or its cluster encrypts.
        DoesNotFit: its GPU has too little memory.
        ClusterError: CUDA or NCCL failed.
    """
    check_plain(worker)
    try:
        return NcclCarriers(open_nccl(settings), rank, num_nodes, worker)
    except UsageError as error:
        raise UsageError(f"on worker {worker}: {error}") from error
    except MemoryError as error:
        needed = format_size(2 * (num_nodes - 1) * 2 * PIECE)
        raise DoesNotFit(
            f"on worker {worker} --transport nccl takes {needed} of the GPU for buffers, and {error}; lower --nodes, or use --transport dask"
        ) from error
    except RuntimeError as error:  # of CUDA or NCCL
        raise _cannot_begin(worker, error) from error


def _cannot_begin(worker: str, error: RuntimeError) -> ClusterError:
    """What CUDA or NCCL said on a node before it had anything to do with peers."""
    return ClusterError(
        f"--transport nccl cannot begin on worker {worker} ({error}); see what it says there with NCCL_DEBUG=WARN, or use --transport dask"
    )


def pieces_of(tiles: Tiles, room: int) -> Iterator[list[tuple[int, int]]]:
    """The memory of tiles, one after another, in pieces of `room` bytes and a rest; a piece is a list of (address, bytes)."""
    piece: list[tuple[int, int]] = []
    left = room
    for tile in tiles:
        flat = bytes_of(tile)
        address, rest = flat.ctypes.data, flat.nbytes
        while rest:
            nbytes = min(rest, left)
            piece.append((address, nbytes))
            address, rest, left = address + nbytes, rest - nbytes, left - nbytes
            if not left:
                yield piece
                piece, left = [], room
    if piece:
        yield piece


async def _reached(link: Link, goal: asyncio.Future[None]) -> None:
    """Wait until a link has come somewhere.

    Raises:
        Exception: it ended before.
    """
    await asyncio.wait((goal, link.ended), return_when=asyncio.FIRST_COMPLETED)
    if not goal.done():
        raise link.ended.result() or OSError("its connection was closed")


async def _first_piece(link: Link) -> None:
    """Carry one piece, for nobody, which makes connections."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    link.put([np.zeros(PIECE, np.uint8)], partial(_settle, over, None))
    await _reached(link, over)


def _settle(future: asyncio.Future[Any], result: object) -> None:
    """Give a future its result, unless nobody waits any more."""
    if not future.done():
        future.set_result(result)
