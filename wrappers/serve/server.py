"""The process of a server: a socket, the loop, signals, and the end.

The first SIGTERM or SIGINT stops listening, refuses new texts, and lets those that run end within a time; what is left is told that the server shuts
down. The second ends it at once, whoever still sends or reads. Either way the exit code is 0; of an engine that has failed it is that of its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nntask import UsageError

from .app import Application
from .engine import TextEngine
from .jobs import Desk

_MARGIN_SECONDS: Final = 5
"""For clients to read what they are told at the end."""
_LAST_SECONDS: Final = 1
"""The same, after the second signal."""
_OF_CLIENTS_THAT_LEFT: Final = "socket.send() raised exception."
"""What asyncio warns of where a stream goes on for a moment to a client that has left; it says nothing to who runs a server."""


class _Protocol(H11Protocol):
    """uvicorn's, which closes connections whose request does not arrive.

    Attributes:
        head_seconds: in which the head of a request must arrive.
    """

    head_seconds = 30.0
    _slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Give the head of a request its time, from its first byte or that of the connection."""
        waits = self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE
        if not waits:
            self._forget()
        elif self._slow is None:
            self._slow = self.loop.call_later(self.head_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None


class _Server(uvicorn.Server):
    """uvicorn's, with our signals.

    Args:
        on_signal: called at the first signal.
        end: tells everybody that the server shuts down.
        grace_seconds: from the first signal until that.
    """

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None], end: Callable[[], None], grace_seconds: float) -> None:
        super().__init__(config)
        self._first, self._end, self._grace = on_signal, end, grace_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM in the loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        loop = asyncio.get_running_loop()
        if self.should_exit:
            self._end()
            loop.call_later(_LAST_SECONDS, self._leave)
            return
        self.should_exit = True
        self._first()
        loop.call_later(self._grace, self._end)

    def _leave(self) -> None:
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host} --port {port} cannot be listened to: {why}; choose another, or port 0 for any that is free") from None


def address_of(listener: socket.socket) -> str:
    """The address of a socket, for browsers and clients."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(application: Application, engine: TextEngine, desk: Desk, listener: socket.socket, *, receive_seconds: float, grace_seconds: float) -> None:
    """Serve until a signal comes or the engine fails, then end both.

    Args:
        receive_seconds: in which the head of a request must arrive.
        grace_seconds: that running texts have to end after a signal.

    Raises:
        BaseException: what the engine failed with.
    """
    asyncio.run(_served(application, engine, desk, listener, receive_seconds, grace_seconds))
    engine.end()
    engine.join()
    if engine.failure is not None:
        raise engine.failure


async def _served(
    application: Application, engine: TextEngine, desk: Desk, listener: socket.socket, receive_seconds: float, grace_seconds: float
) -> None:
    config = uvicorn.Config(
        application.asgi,
        http=type("Protocol", (_Protocol,), {"head_seconds": receive_seconds}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=16 << 10,
        timeout_graceful_shutdown=int(grace_seconds) + _MARGIN_SECONDS,
    )

    def begin_ending() -> None:
        application.is_ending = True

    logging.getLogger("asyncio").addFilter(lambda record: record.getMessage() != _OF_CLIENTS_THAT_LEFT)
    server = _Server(config, begin_ending, application.end, grace_seconds)
    loop = asyncio.get_running_loop()
    desk.open(loop, lambda: _exit(server))
    await server.serve(sockets=[listener])


def _exit(server: Any) -> None:
    server.should_exit = True
