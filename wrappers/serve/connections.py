"""Client connections: time limits for every wait, and a total below the limit of open files.

A connection waits for its client in four ways: for the head of a request, for the rest of a body whose request is answered already, for the client to
read the response, and for the client to finish after a close. A sweep regularly closes connections that have waited too long. (`app` limits
the time for the body of a request that is being answered.)

If there are too many connections, the one that has been silent longest is closed, but never one whose answer is being computed. So clients that
hold connections cannot keep others out. Each pipelined request waits for its own turn of the event loop, so clients that send hundreds of them at
once do not delay others.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections import deque
from typing import Any, ClassVar, Final, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ACCEPTED_AT_ONCE: Final = 4
"""Number of connections that the event loop accepts in one turn. It reads the data of a new connection two turns later."""
_YOUNG: Final = 4 * ACCEPTED_AT_ONCE
"""Number of connections reserved for clients without running texts, so that a new one is read before newer ones can displace it."""
_MOST: Final = 1000
_SPARE: Final = 32
"""Number of open files reserved for connections that are being accepted or closed, and for the program itself."""
_LEAST: Final = 2 * _YOUNG
_LINGER_SECONDS: Final = 5.0
"""Time limit for the rest of a body whose request is answered already: a client that is still sending reads the answer only afterwards."""

Awaited = Literal["head", "rest", "reader", "end"]


def most_connections() -> int:
    """Return the number of connections that the limit of open files still allows."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(_LEAST, min(_MOST, allowed - len(os.listdir("/proc/self/fd")) - _SPARE))


def most_texts() -> int:
    """Return the maximum number of texts that run or wait, so that connections remain for other requests."""
    return most_connections() - _YOUNG


class _JoinedWrites:
    """A transport that joins all writes of one turn of the event loop, so that head and body of an answer share a packet.

    Args:
        transport: transport of the connection.
        loop: event loop of the connection.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes at the end of the turn."""
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        data = b"".join(self._written)
        self._written.clear()
        if data:
            self._transport.write(data)


class ClientConnection(H11Protocol):
    """A connection of uvicorn that tracks which event it waits for.

    Attributes:
        most: largest number of connections.
        seconds: limit of each wait for the client; at most `_LINGER_SECONDS` for the rest of a body.
        queued: connections of the server with a request that waits for its turn.
    """

    most = _MOST
    seconds = 30.0
    queued: ClassVar[deque[ClientConnection]] = deque()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._heard_at = self.loop.time()
        self._num_pauses = 0
        self._is_queued = False
        self._wait: tuple[Awaited, Any, int] | None = None
        self._waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, and close the one that has been silent longest if there are too many."""
        super().connection_made(_JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        open_now: set[Any] = self.connections
        if len(open_now) > self.most:
            others = [each for each in open_now if each is not self and not each.is_answering and not each.transport.is_closing()]
            (min(others, key=lambda each: each._heard_at) if others else self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Record the time of the client's last data."""
        self._heard_at = self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Go on to the next request. One that has arrived already waits for its turn, and reading is paused meanwhile."""
        is_next = (self.conn.our_state, self.conn.their_state) == (h11.DONE, h11.DONE) and bool(self.conn.trailing_data[0])
        self._is_queued = is_next and not self.transport.is_closing()
        super().on_response_complete()
        if self._is_queued:
            self.flow.pause_reading()
            self.queued.append(self)
            if len(self.queued) == 1:
                self.loop.call_soon(self._begin_next)

    def handle_events(self) -> None:
        """Handle the received data, unless the connection waits for its turn."""
        if not self._is_queued:
            super().handle_events()

    def _begin_next(self) -> None:
        """Handle the first queued request now, and the next one in the next turn of the loop."""
        first = self.queued.popleft()
        if self.queued:
            self.loop.call_soon(self._begin_next)
        first._is_queued = False
        if not first.transport.is_closing():
            first.flow.resume_reading()
            first.handle_events()

    def pause_writing(self) -> None:
        """Record that the client reads more slowly than the server writes."""
        self._num_pauses += 1
        super().pause_writing()

    @property
    def is_answering(self) -> bool:
        """Whether a complete request is being answered and the client reads (MUST_CLOSE: the client announced that this request is its last)."""
        return (
            self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
            and self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)
            and not self.flow.write_paused
        )

    def _awaited(self) -> Awaited | None:
        """Return the event that the connection expects from the client; None while the client waits for an answer."""
        ours, theirs = self.conn.our_state, self.conn.their_state
        if self.transport.is_closing():
            return "end"
        if self.flow.write_paused:
            return "reader"
        if ours is h11.IDLE and theirs is h11.IDLE:
            return "head"
        if ours in (h11.DONE, h11.MUST_CLOSE) and theirs is h11.SEND_BODY:
            return "rest"
        return None

    def sweep(self) -> None:
        """Close the connection if it has waited for its client for too long."""
        now, awaited = self.loop.time(), self._awaited()
        wait = None if awaited is None else (awaited, self.cycle, self._num_pauses)
        if wait != self._wait:
            self._wait, self._waits_since = wait, now
        elif awaited is not None and now - self._waits_since >= (min(self.seconds, _LINGER_SECONDS) if awaited == "rest" else self.seconds):
            self.transport.abort() if awaited in ("reader", "end") else self.transport.close()


async def sweep(connections: set[Any], seconds: float) -> None:
    """Check all connections until cancelled, often enough for a limit of `seconds`."""
    while True:
        await asyncio.sleep(min(1.0, seconds / 4))
        for connection in list(connections):
            connection.sweep()
