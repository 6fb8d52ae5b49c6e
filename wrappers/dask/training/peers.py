"""State of a node about one peer: buckets to send and to receive, requests of the peer, and buckets in flight. Connections are in `exchange`."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from scheduler import SchedulerError

from .transports import Channel, Tiles, nbytes_of

WINDOW: Final = 4 << 20
"""Bytes in flight to a peer beyond which no further bucket is sent; at most twice the largest bucket."""

MESSAGE: Final = 256 << 10
"""Bytes beyond which a message takes no further bucket, so that requests and confirmations do not wait long for its end."""

GOT_SECONDS: Final = 0.02
"""Longest delay of a confirmation, if no other message goes to the peer and less than half a window is unconfirmed: the processor time of a message
equals that of copying about 2 MB.
"""

Done = Callable[[BaseException | None], None]
Waiting = tuple[Tiles, Done]
CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


class PeerLost(SchedulerError):
    """The connection to another node broke.

    Attributes:
        rank: rank of that node.
        why: reason, as in the message.
    """

    def __init__(self, rank: int, why: object) -> None:
        super().__init__(f"node {rank} does not answer any more: {why}")
        self.rank, self.why = rank, str(why)


class Peer:
    """State of a node about one peer. It belongs to the thread of an event loop.

    Args:
        rank: rank of the peer.
        call_later: method of the event loop.

    Attributes:
        comm: the connection.
        channel: moves the bytes of buckets.
        lost: the reason why nothing is exchanged with the peer any more; None while something may be.
        wake: set when a message may be due.
        sent_bytes: bytes sent to the peer so far, over any channel.
    """

    def __init__(self, rank: int, call_later: CallLater) -> None:
        self.rank = rank
        self.comm: Any = None
        self.channel = Channel()
        self.lost: PeerLost | None = None
        self.wake = asyncio.Event()
        self.sent_bytes = 0
        self._call_later = call_later
        self._queued: defaultdict[str, deque[Waiting]] = defaultdict(deque)  # sends that the peer has not requested
        self._wanted: Counter[str] = Counter()  # requests of the peer without a send task
        self._expected: defaultdict[str, deque[Waiting]] = defaultdict(deque)  # receive tasks
        self._asks: list[str] = []  # requests for the next message
        self._ready: deque[tuple[str, Waiting]] = deque()  # sends that the peer has requested
        self._in_flight: deque[tuple[int, Done]] = deque()
        self._arriving: deque[tuple[int, Done]] = deque()
        self._in_flight_nbytes = 0
        self._num_got = 0  # confirmations for the next message
        self._got_nbytes = 0
        self._must_confirm = False  # without waiting for another reason to send a message
        self._later: asyncio.TimerHandle | None = None  # sets it after a delay

    def enqueue(self, key: str, waiting: Waiting) -> None:
        """Enter a send task."""
        self._queued[key].append(waiting)
        self._match(key)

    def expect(self, key: str, waiting: Waiting) -> None:
        """Enter a receive task, and request its bucket."""
        self._expected[key].append(waiting)
        self._asks.append(key)
        self.wake.set()

    def _match(self, key: str) -> None:
        """Make sends of `key` ready as far as the peer has requested them."""
        sends = self._queued[key]
        while sends and self._wanted[key]:
            self._wanted[key] -= 1
            self._ready.append((key, sends.popleft()))
            self.wake.set()

    def next_message(self, window: int) -> dict[str, Any] | None:
        """Return the next message; None if there is none, or it may wait.

        Args:
            window: bytes in flight beyond which no further bucket is sent.
        """
        if not (self._asks or self._must_confirm or (self._ready and self._in_flight_nbytes < window)):
            return None
        keys: list[str] = []
        data: list[Any] = []
        filled = 0
        while self._ready and self._in_flight_nbytes < window and filled < MESSAGE:
            key, (tiles, done) = self._ready.popleft()
            nbytes = nbytes_of(tiles)
            keys.append(key)
            data.append(self.channel.put(tiles))
            filled += nbytes
            self._in_flight.append((nbytes, done))
            self._in_flight_nbytes += nbytes
            if self.channel.is_separate:
                self.sent_bytes += nbytes
        asks, num_got = self._take_confirmations()
        return {"want": asks, "got": num_got, "keys": keys, "data": data}

    def handle(self, message: dict[str, Any], window: int) -> None:
        """Handle a message of the peer.

        Raises:
            IndexError, ValueError, KeyError: the message was not to be expected.
        """
        for key, content in zip(message["keys"], message["data"], strict=True):
            tiles, done = self._expected[key].popleft()
            self._arriving.append((nbytes_of(tiles), done))
            self.channel.take(content, tiles, partial(self._arrived, window))
        for _ in range(message["got"]):
            nbytes, done = self._in_flight.popleft()
            self._in_flight_nbytes -= nbytes
            done(None)
            self.wake.set()
        for key in message["want"]:
            self._wanted[key] += 1
            self._match(key)

    def _arrived(self, window: int) -> None:
        """Complete the oldest arriving bucket."""
        if self.lost is None:
            nbytes, done = self._arriving.popleft()
            done(None)
            self._num_got += 1
            self._got_nbytes += nbytes
            if 2 * self._got_nbytes >= window:
                self._confirm()
            elif self._later is None:
                self._later = self._call_later(GOT_SECONDS, self._confirm)

    def _confirm(self) -> None:
        """Confirm the arrived buckets now."""
        self._must_confirm = True
        self.wake.set()

    def _take_confirmations(self) -> tuple[list[str], int]:
        """Return the requests and the number of confirmations for a message that is sent now."""
        asks, num_got = self._asks, self._num_got
        self._asks, self._num_got, self._got_nbytes, self._must_confirm = [], 0, 0, False
        self._cancel_later()
        return asks, num_got

    def _cancel_later(self) -> None:
        """Cancel a delayed confirmation."""
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def lose(self, error: BaseException) -> None:
        """End the connection, because it broke, and fail all waiting tasks. Only the first call counts."""
        if self.lost is None:
            self.comm.abort()
            self.give_up(PeerLost(self.rank, error))

    def give_up(self, lost: PeerLost) -> None:
        """Fail all waiting tasks, because a peer is lost, this one or another one; tasks whose tiles the channel uses fail when it has ended. Only
        the first call counts."""
        if self.lost is not None:
            return
        self.lost = lost
        self._cancel_later()
        waiting = [done for table in (self._queued, self._expected) for queue in table.values() for _, done in queue]
        waiting += [done for _, (_, done) in self._ready]
        self._queued.clear()
        self._expected.clear()
        self._ready.clear()
        for done in waiting:
            done(self.lost)
        self.channel.stop(self._fail_in_flight)

    def _fail_in_flight(self) -> None:
        """Fail the tasks whose tiles the channel has used, once it has ended."""
        carried = [done for _, done in (*self._in_flight, *self._arriving)]
        self._in_flight.clear()
        self._arriving.clear()
        for done in carried:
            done(self.lost)


def window_for(largest: int) -> int:
    """Return the bytes in flight to a peer beyond which no further bucket is sent, from the bytes of the largest bucket."""
    return min(WINDOW, 2 * largest)
