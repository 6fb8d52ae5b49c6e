"""One direction of NCCL between two nodes: a communicator, used by one thread alone, and a staging buffer in the GPU's memory.

Tiles are in RAM and pass through the staging buffer in pieces: while one half of it is sent, the next piece is copied to the other half; the receiver
works the other way round. If RAM is not page-locked, a copy call returns only when all earlier work on its stream has ended, so copies never follow
work that waits for a peer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np

from scheduler.drivers import CupyNccl, Event, Gpu, UniqueId

from .transports import Tiles, bytes_of

PIECE: Final = 2 << 20
"""Largest transfer in bytes; the staging buffer of a link holds two in the GPU's memory."""

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

    def __init__(self, nccl: CupyNccl, staging: StagingBuffers, unique_id: UniqueId, is_sender: bool, name: str) -> None:
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


async def reached(link: NcclLink, goal: asyncio.Future[None]) -> None:
    """Wait for an event of a link.

    Raises:
        Exception: the link ended before.
    """
    await asyncio.wait((goal, link.ended), return_when=asyncio.FIRST_COMPLETED)
    if not goal.done():
        raise link.ended.result() or OSError("its connection was closed")


async def move_first_piece(link: NcclLink) -> None:
    """Transfer one dummy piece, which makes NCCL connect."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    link.put([np.zeros(PIECE, np.uint8)], partial(_resolve, over, None))
    await reached(link, over)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not future.done():
        future.set_result(result)
