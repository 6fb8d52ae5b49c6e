"""What a node knows of another one: what tasks send there and wait for, what the peer wants, what is on the way. For connections see `exchange`."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from scheduler.core.errors import SchedulerError

from .carriers import Carrier, MessageCarrier, Tiles, nbytes_of

WINDOW: Final = 4 << 20
"""Bytes on the way to a peer after which no further bucket is sent before the peer has got some, at most; twice the largest bucket where that is
less."""

MESSAGE: Final = 256 << 10
"""Bytes after which a message takes no further bucket: what the peer asks for next, and what it was told, should not wait long behind it."""

GOT_SECONDS: Final = 0.02
"""How long a peer is not told what this node has got, if no other message goes there, while what it is not told of is less than half a window: a
message takes as much processor time as copying some 2 MB."""

Done = Callable[[BaseException | None], None]
Waiting = tuple[Tiles, Done]
CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


class PeerLost(SchedulerError):
    """The connection to another node broke.

    Attributes:
        rank: of that node.
    """

    def __init__(self, rank: int, why: object) -> None:
        super().__init__(f"node {rank} does not answer any more: {why}")
        self.rank = rank

    def __reduce__(self) -> Any:
        return type(self), (self.rank, str(self).partition(": ")[2]), vars(self)


class Peer:
    """What a node knows of another one. Belongs to the thread of an event loop.

    Args:
        rank: of the peer.
        call_later: of the event loop.

    Attributes:
        comm: the connection.
        carrier: of the bytes of buckets.
        lost: why the peer does not answer any more, if so.
        wake: set when there may be something to say.
        sent_bytes: to the peer so far, by whoever carries them.
    """

    def __init__(self, rank: int, call_later: CallLater) -> None:
        self.rank = rank
        self.comm: Any = None
        self.carrier: Carrier = MessageCarrier()
        self.lost: PeerLost | None = None
        self.wake = asyncio.Event()
        self.sent_bytes = 0
        self._call_later = call_later
        self._offers: defaultdict[str, deque[Waiting]] = defaultdict(deque)  # what tasks of ours send, not yet wanted
        self._wanted: Counter[str] = Counter()  # what the peer wants and no task of ours has sent yet
        self._expected: defaultdict[str, deque[Waiting]] = defaultdict(deque)  # what tasks of ours receive
        self._asks: list[str] = []  # what to ask for in the next message
        self._ready: deque[tuple[str, Waiting]] = deque()  # wanted and offered
        self._on_the_way: deque[tuple[int, Done]] = deque()
        self._arriving: deque[tuple[int, Done]] = deque()
        self._on_the_way_nbytes = 0
        self._num_got = 0  # to tell in the next message
        self._got_nbytes = 0
        self._must_tell = False  # without waiting for another reason to write
        self._later: asyncio.TimerHandle | None = None  # when that is so

    def offer(self, key: str, waiting: Waiting) -> None:
        """A task of ours sends a bucket."""
        self._offers[key].append(waiting)
        self._match(key)

    def expect(self, key: str, waiting: Waiting) -> None:
        """A task of ours waits for a bucket: ask for it."""
        self._expected[key].append(waiting)
        self._asks.append(key)
        self.wake.set()

    def _match(self, key: str) -> None:
        """The peer wants `key`, or a task sends it: if both, it is ready."""
        offers = self._offers[key]
        while offers and self._wanted[key]:
            self._wanted[key] -= 1
            self._ready.append((key, offers.popleft()))
            self.wake.set()

    def next_message(self, window: int) -> dict[str, Any] | None:
        """What there is to say; None where that is nothing, or may wait.

        Args:
            window: bytes on the way after which no further bucket is sent.
        """
        if not (self._asks or self._must_tell or (self._ready and self._on_the_way_nbytes < window)):
            return None
        keys: list[str] = []
        data: list[Any] = []
        filled = 0
        while self._ready and self._on_the_way_nbytes < window and filled < MESSAGE:
            key, (tiles, done) = self._ready.popleft()
            nbytes = nbytes_of(tiles)
            keys.append(key)
            data.append(self.carrier.put(tiles))
            filled += nbytes
            self._on_the_way.append((nbytes, done))
            self._on_the_way_nbytes += nbytes
            if self.carrier.is_beside:
                self.sent_bytes += nbytes
        asks, num_got = self._told()
        return {"want": asks, "got": num_got, "keys": keys, "data": data}

    def hear(self, message: dict[str, Any], window: int) -> None:
        """Take what the peer says.

        Raises:
            IndexError, ValueError, KeyError: nobody can expect that.
        """
        for key, said in zip(message["keys"], message["data"], strict=True):
            tiles, done = self._expected[key].popleft()
            self._arriving.append((nbytes_of(tiles), done))
            self.carrier.take(said, tiles, partial(self._arrived, window))
        for _ in range(message["got"]):
            nbytes, done = self._on_the_way.popleft()
            self._on_the_way_nbytes -= nbytes
            done(None)
            self.wake.set()
        for key in message["want"]:
            self._wanted[key] += 1
            self._match(key)

    def _arrived(self, window: int) -> None:
        """A bucket is there, the next one of those that its carrier was told of."""
        if self.lost is None:
            nbytes, done = self._arriving.popleft()
            done(None)
            self._num_got += 1
            self._got_nbytes += nbytes
            if 2 * self._got_nbytes >= window:
                self._tell()
            elif self._later is None:
                self._later = self._call_later(GOT_SECONDS, self._tell)

    def _tell(self) -> None:
        """Tell the peer now what this node has got."""
        self._must_tell = True
        self.wake.set()

    def _told(self) -> tuple[list[str], int]:
        """What a message that goes now asks for, and how many buckets it confirms."""
        asks, num_got = self._asks, self._num_got
        self._asks, self._num_got, self._got_nbytes, self._must_tell = [], 0, 0, False
        self._forget_later()
        return asks, num_got

    def _forget_later(self) -> None:
        """Nothing is left to tell later."""
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def lose(self, error: BaseException) -> None:
        """The connection broke: fail whoever waits. Tiles that the carrier has are let go when it has ended. Once only."""
        if self.lost is not None:
            return
        self.lost = PeerLost(self.rank, error)
        self._forget_later()
        self.comm.abort()
        waiting = [done for table in (self._offers, self._expected) for queue in table.values() for _, done in queue]
        waiting += [done for _, (_, done) in self._ready]
        self._offers.clear()
        self._expected.clear()
        self._ready.clear()
        for done in waiting:
            done(self.lost)
        self.carrier.stop(self._let_go)

    def _let_go(self) -> None:
        """The carrier of a lost peer has ended."""
        carried = [done for _, done in (*self._on_the_way, *self._arriving)]
        self._on_the_way.clear()
        self._arriving.clear()
        for done in carried:
            done(self.lost)


def window_for(largest: int) -> int:
    """Bytes on the way to a peer after which no further bucket is sent, from the bytes of the largest bucket."""
    return min(WINDOW, 2 * largest)


def passing_bytes(num_peers: int, largest: int) -> int:
    """Most bytes that are in memory for a node besides its tiles: what is on the way to it, and copies of what is on the way from it.

    Args:
        largest: bytes of the largest bucket.
    """
    return 2 * num_peers * (window_for(largest) + largest)
