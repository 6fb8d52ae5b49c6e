"""Connections of the server: each waits for its client for a limited time, and all together stay below the limit of open files.

A connection waits for its client in four ways: for the head of a request, for the rest of a body whose request was answered already, for a reader of
what was written, and for the end of what a closed connection still has to send. A sweep looks at all connections regularly and closes those that have
waited too long. (The body of a request that is being answered has a limit of its own, in `app`.)

When there are too many connections, the one that has been silent longest makes room; one whose answer is being computed never does. So clients that
hold connections cannot keep others out. Requests that arrive before the answer to the one before wait for a turn of the event loop each, so clients
that send hundreds of them at once do not delay others.
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
"""Connections that the event loop accepts in one turn. It reads what a new connection sent two turns later."""
_YOUNG: Final = 4 * ACCEPTED_AT_ONCE
"""Connections that are kept free of running texts, so that a new one is read before it has to make room for newer ones."""
_MOST: Final = 1000
_SPARE: Final = 32
"""Open files that are left for connections being accepted, those being closed, and the program."""
_LEAST: Final = 2 * _YOUNG
_LINGER_SECONDS: Final = 5.0
"""For the rest of a body whose request was answered: a client that is still sending reads its answer afterwards."""

Awaited = Literal["head", "rest", "reader", "end"]


def most_connections() -> int:
    """Return how many connections the limit of open files allows besides what is open now."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(_LEAST, min(_MOST, allowed - len(os.listdir("/proc/self/fd")) - _SPARE))


def most_texts() -> int:
    """Return how many texts may run and wait, so that connections remain for others."""
    return most_connections() - _YOUNG


class _JoinedWrites:
    """A transport that sends what is written in one turn of the event loop together: head and body of an answer are one packet.

    Args:
        transport: that of the connection.
        loop: its event loop.
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
    """A connection of uvicorn that knows what it waits for.

    Attributes:
        most: largest number of connections.
        seconds: limit of each wait for the client; of the rest of a body at most `_LINGER_SECONDS`.
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
        """Take the connection, in place of the one that has been silent longest if there are too many."""
        super().connection_made(_JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        open_now: set[Any] = self.connections
        if len(open_now) > self.most:
            others = [each for each in open_now if each is not self and not each.is_answering and not each.transport.is_closing()]
            (min(others, key=lambda each: each._heard_at) if others else self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Note when the client was heard."""
        self._heard_at = self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Go on to the next request; one that is there already waits for its turn, and nothing more is read meanwhile."""
        is_next = (self.conn.our_state, self.conn.their_state) == (h11.DONE, h11.DONE) and bool(self.conn.trailing_data[0])
        self._is_queued = is_next and not self.transport.is_closing()
        super().on_response_complete()
        if self._is_queued:
            self.flow.pause_reading()
            self.queued.append(self)
            if len(self.queued) == 1:
                self.loop.call_soon(self._begin_next)

    def handle_events(self) -> None:
        """Handle what has arrived, unless it waits for its turn."""
        if not self._is_queued:
            super().handle_events()

    def _begin_next(self) -> None:
        """Let the first of the requests that wait for their turn begin, and the next one in the next turn."""
        first = self.queued.popleft()
        if self.queued:
            self.loop.call_soon(self._begin_next)
        first._is_queued = False
        if not first.transport.is_closing():
            first.flow.resume_reading()
            first.handle_events()

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than is written."""
        self._num_pauses += 1
        super().pause_writing()

    @property
    def is_answering(self) -> bool:
        """Whether an answer is computed for a request that has arrived whole (MUST_CLOSE: from a client that asks once), and the client reads it."""
        return (
            self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
            and self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)
            and not self.flow.write_paused
        )

    def _awaited(self) -> Awaited | None:
        """What the connection waits for the client to do; None while the client waits for it."""
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
    """Look at connections until cancelled, often enough for a limit of that many seconds."""
    while True:
        await asyncio.sleep(min(1.0, seconds / 4))
        for connection in list(connections):
            connection.sweep()
