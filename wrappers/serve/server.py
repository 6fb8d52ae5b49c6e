"""The process of a server: socket, event loop, signals and shutdown.

The first SIGTERM or SIGINT stops listening, refuses new texts, and gives running texts a limited time to end; the remaining ones end with an error.
The second signal shuts down at once, even if clients still send or read. The exit code is 0; if the engine failed, it is that of its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn

from nntask import UsageError

from .app import Application
from .connections import ACCEPTED_AT_ONCE, ClientConnection, most_connections, sweep
from .engine import TextEngine
from .jobs import Desk

_MARGIN_SECONDS: Final = 5
"""Time for clients to read the last response after running texts have been ended."""
_BACKLOG: Final = 512
"""Number of connections that may wait to be accepted."""
_UNREAD_NBYTES: Final = 16 << 10
"""Bytes that the kernel keeps for a client that does not read. (It doubles the number; the event loop keeps 64 KiB more.)"""
_LAST_SECONDS: Final = 1
"""The same time after the second signal."""
_OF_CLIENTS_THAT_LEFT: Final = "socket.send() raised exception."
"""Warning of asyncio about a stream that briefly continues after its client has disconnected; of no use to the operator."""
_OF_BAD_REQUESTS: Final = ("Invalid HTTP request received.", "Unsupported upgrade request.")
"""Warnings of uvicorn about single requests, with which any client could fill the log."""


class _Server(uvicorn.Server):
    """A uvicorn server with its own signal handlers.

    Args:
        on_signal: callback for the first signal.
        end: callback that ends all running texts.
        grace_seconds: time between the first signal and the call of `end`.
    """

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None], end: Callable[[], None], grace_seconds: float) -> None:
        super().__init__(config)
        self._first, self._end, self._grace = on_signal, end, grace_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a kernel queue that is longer than the number of connections accepted at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

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
    """Return a listening socket whose connections send without delay and buffer little for clients that do not read.

    Raises:
        UsageError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; asyncio sets it only if a socket names its protocol
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_NBYTES)
        return listener
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host} --port {port} cannot be listened to: {why}", "choose another, or port 0 for any that is free") from None


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(application: Application, engine: TextEngine, desk: Desk, listener: socket.socket, *, receive_seconds: float, grace_seconds: float) -> None:
    """Serve until a signal comes or the engine fails, then end both.

    Args:
        receive_seconds: time limit for the head of a request.
        grace_seconds: time that running texts get to end after a signal.

    Raises:
        BaseException: the exception that ended the engine.
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
        http=type("Protocol", (ClientConnection,), {"seconds": receive_seconds, "most": most_connections(), "queued": deque()}),
        backlog=ACCEPTED_AT_ONCE,
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
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.getMessage() not in _OF_BAD_REQUESTS)
    server = _Server(config, begin_ending, application.end, grace_seconds)
    loop = asyncio.get_running_loop()
    desk.open(loop, lambda: _exit(server))
    if engine.failure is not None:  # the engine has failed before the desk was open
        _exit(server)
    sweeper = loop.create_task(sweep(server.server_state.connections, receive_seconds))
    try:
        await server.serve(sockets=[listener])
    finally:
        sweeper.cancel()


def _exit(server: Any) -> None:
    server.should_exit = True
