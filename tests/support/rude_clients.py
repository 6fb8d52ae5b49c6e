"""Clients of a server that hold its connections: silent, slow, never reading, leaving early, with wrong keys or unfinished requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Final

from support.deadline import DEADLINE
from support.served import KEY

AUTHORIZED: Final = f"authorization: Bearer {KEY}\r\n"
JSON: Final = "content-type: application/json\r\n"
EARLY: Final[dict[str, tuple[str, str]]] = {
    "401": ("POST /v1/completions", JSON),
    "403": ("POST /v1/completions", f"{JSON}{AUTHORIZED}x: y\r\n"),
    "404": ("POST /v1/nothing", f"{JSON}{AUTHORIZED}"),
    "405": ("GET /v1/completions", f"{JSON}{AUTHORIZED}"),
    "415": ("POST /v1/completions", f"content-type: text/plain\r\n{AUTHORIZED}"),
    "200": ("GET /", AUTHORIZED),
}
"""Status of an answer that comes before the body of its request -> request line and headers."""


def request(line: str, headers: str, host: str = "127.0.0.1") -> bytes:
    """The head of a request whose body of 50 bytes does not follow."""
    return f"{line} HTTP/1.1\r\nhost: {host}\r\n{headers}content-length: 50\r\n\r\n".encode()


def answered_early(status: str) -> bytes:
    """The head of a request that is answered before its body arrives."""
    return request(*EARLY[status], "evil.example" if status == "403" else "127.0.0.1")


def whole(body: Mapping[str, object], path: str = "/v1/completions") -> bytes:
    """A whole request."""
    text = json.dumps(body)
    return f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{JSON}{AUTHORIZED}content-length: {len(text)}\r\n\r\n{text}".encode()


@dataclass(frozen=True, slots=True)
class Rude:
    """What a client does on a connection, again and again.

    Attributes:
        sends: bytes that it sends at once.
        then: bytes that it sends every second afterwards; b"" for silence.
        reads: whether it reads what comes.
        leaves: whether it closes the connection as soon as something has come, or at once if it does not read.
        half_closes: whether it says that nothing more will be sent.
    """

    sends: bytes
    then: bytes = b""
    reads: bool = True
    leaves: bool = False
    half_closes: bool = False


_HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
_PAGES: Final = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200
_STREAM: Final = whole({"model": "small", "prompt": "a", "max_tokens": 150, "stream": True})
_CHUNKED: Final = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{JSON}transfer-encoding: chunked\r\n".encode()
_OPEN_BODY: Final = request("POST /v1/completions", f"{JSON}{AUTHORIZED}") + b'{"model"'

HELD: Final[dict[str, Rude]] = {
    "silent": Rude(b""),
    **{f"answered early, {status}": Rude(answered_early(status)) for status in EARLY},
    "pages that nobody reads": Rude(_PAGES, reads=False),
    "streams that are left": Rude(_STREAM, leaves=True),
}
"""Kinds of connections that a review of the server held."""
MORE_HELD: Final[dict[str, Rude]] = {
    "half a head": Rude(_HEAD),
    "half a body": Rude(_OPEN_BODY),
    "half a chunk": Rude(_CHUNKED + f"{AUTHORIZED}\r\n5\r\n12".encode()),
    "answers that nobody reads": Rude(_STREAM, reads=False),
}
"""More kinds of connections that are held."""
MOVING: Final[dict[str, Rude]] = {
    "a head by bytes": Rude(_HEAD + b"x: ", b"x"),
    "a body by bytes": Rude(_OPEN_BODY, b" "),
    "chunks by bytes": Rude(_CHUNKED + f"{AUTHORIZED}\r\n".encode(), b"1\r\n \r\n"),
    "chunks with a wrong key": Rude(_CHUNKED + b"authorization: Bearer none\r\n\r\n", b"1\r\n \r\n"),
    "a body after a wrong key": Rude(answered_early("401"), b"x"),
    "pages in a queue": Rude(_PAGES, b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"),
    "leaves at once": Rude(b"", reads=False, leaves=True),
    "leaves while a body is read": Rude(_OPEN_BODY, reads=False, leaves=True),
    "leaves before its answer": Rude(_STREAM, reads=False, leaves=True),
    "says that nothing follows": Rude(_STREAM, half_closes=True),
    "no HTTP": Rude(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)),
}
"""Kinds of clients that go on sending, leave, or speak something else."""
_PACE_SECONDS: Final = 1.0
_UNREAD_PACES: Final = 8
"""Life of a connection whose client reads nothing, and so does not see that the server has closed it."""


def address(url: str) -> tuple[str, int]:
    """Host and port of a server."""
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@contextmanager
def held(url: str, kind: Rude, count: int) -> Iterator[None]:
    """Connections of a kind, all open at once if the server lets them; what their clients send has been sent."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            connection = opened.enter_context(socket.create_connection(address(url), DEADLINE))
            if not kind.reads:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            if not kind.leaves:
                connection.setblocking(False)
            with contextlib.suppress(OSError):  # the server has closed it, or takes no more
                connection.send(kind.sends)
                if kind.leaves:
                    connection.recv(1)
                    connection.close()
        yield


class _Crowd:
    """Clients at work in an event loop of their own."""

    def __init__(self, url: str, kinds: Mapping[str, Rude], each: int) -> None:
        self.num_connections = Counter[str]()
        self._address, self._kinds, self._each = address(url), kinds, each
        self._loop = asyncio.new_event_loop()
        self._work = self._loop.create_task(self._all())
        self._thread = Thread(target=self._run, name="rude clients")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join()
        if not self._work.cancelled():
            self._work.result()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._work)
        self._loop.close()

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, kind in self._kinds.items():
                for _ in range(self._each):
                    group.create_task(self._client(name, kind))

    async def _client(self, name: str, kind: Rude) -> None:
        while True:
            with socket.socket() as connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                if not kind.reads:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
                await self._loop.sock_connect(connection, self._address)
                self.num_connections[name] += 1
                await self._misbehave(connection, kind)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PACE_SECONDS / 4):
                    await asyncio.Event().wait()

    async def _misbehave(self, connection: socket.socket, kind: Rude) -> None:
        """Do what the kind does until the server closes the connection.

        Raises:
            OSError: the server has reset it.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PACE_SECONDS):  # a server that is not read takes no more at some point
                await self._loop.sock_sendall(connection, kind.sends)
        if kind.half_closes:
            connection.shutdown(socket.SHUT_WR)
        if kind.leaves:
            if kind.reads:
                await self._loop.sock_recv(connection, 1)
            return
        for _ in itertools.count() if kind.reads else range(_UNREAD_PACES):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PACE_SECONDS):
                    await (self._until_closed(connection) if kind.reads else asyncio.Event().wait())
                    return
            if kind.then:
                with contextlib.suppress(BlockingIOError):
                    connection.send(kind.then)

    async def _until_closed(self, connection: socket.socket) -> None:
        while await self._loop.sock_recv(connection, 1 << 16):
            pass


@contextmanager
def crowd(url: str, kinds: Mapping[str, Rude], each: int) -> Iterator[Counter[str]]:
    """Rude clients in the background, `each` of every kind; the value counts the connections of each kind."""
    clients = _Crowd(url, kinds, each)
    clients.start()
    try:
        yield clients.num_connections
    finally:
        clients.stop()
