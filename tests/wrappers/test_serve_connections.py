"""Connections that are held: silent, slow, never read, or too many; clients who behave are answered meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from support.deadline import DEADLINE
from support.served import KEY, Alone, Served, served, write_served_model

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
"""What a server's process runs first."""
AUTHORIZED = f"authorization: Bearer {KEY}\r\n"
JSON = "content-type: application/json\r\n"
EARLY: dict[str, tuple[str, str]] = {
    "401": ("POST /v1/completions", JSON),
    "403": ("POST /v1/completions", f"{JSON}{AUTHORIZED}x: y\r\n"),
    "404": ("POST /v1/nothing", f"{JSON}{AUTHORIZED}"),
    "405": ("GET /v1/completions", f"{JSON}{AUTHORIZED}"),
    "415": ("POST /v1/completions", f"content-type: text/plain\r\n{AUTHORIZED}"),
    "200": ("GET /", AUTHORIZED),
}
"""Status of an answer that comes before the body of its request -> request line and headers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    return write_served_model(tmp_path_factory.mktemp("served") / "small")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag of a file with the key."""
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    return f"--api-key-file={file}"


@pytest.fixture(scope="module")
def server(model: Path, key_file: str) -> Iterator[Served]:
    """A server that waits two seconds for clients."""
    with served(model, key_file, "--receive-seconds", "2", "--slots", "2") as found:
        yield found


@contextmanager
def connected(server: Served) -> Iterator[socket.socket]:
    """A connection to a server."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), DEADLINE) as found:
        yield found


def request(line: str, headers: str, host: str = "127.0.0.1") -> bytes:
    """The head of a request whose body of 50 bytes does not follow."""
    return f"{line} HTTP/1.1\r\nhost: {host}\r\n{headers}content-length: 50\r\n\r\n".encode()


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    while True:
        try:
            more = connection.recv(1 << 16)
        except ConnectionError:
            return found
        if not more:
            return found
        found += more


@pytest.mark.parametrize("more", [b"", b"{"], ids=["silent", "one more byte"])
@pytest.mark.parametrize("status", EARLY)
def test_a_request_that_was_answered_early_does_not_hold_its_connection(status: str, more: bytes, server: Served) -> None:
    """The answer comes at once, and the rest of the body is not waited for without limit, also where a byte of it follows."""
    line, headers = EARLY[status]
    with connected(server) as connection:
        connection.sendall(request(line, headers, "evil.example" if status == "403" else "127.0.0.1"))
        first = connection.recv(1 << 16)
        assert first.startswith(f"HTTP/1.1 {status}".encode())
        if more:
            connection.sendall(more)
        until_closed(connection)


def test_a_body_that_comes_after_its_answer_keeps_the_connection(server: Served) -> None:
    """A client that sends on is answered on the same connection once more."""
    with connected(server) as connection:
        connection.sendall(request("POST /v1/completions", JSON))
        answer = b""
        while b"invalid_api_key" not in answer:
            answer += connection.recv(1 << 16)
        connection.sendall(b"x" * 50 + b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        assert b'{"status":"ok"}' in until_closed(connection)


def send_without_end(connection: socket.socket, piece: bytes) -> None:
    """Send until the other side resets the connection."""
    while True:
        connection.sendall(piece)


def test_a_client_that_never_reads_is_cut_off(server: Served) -> None:
    """Hundreds of answers that nobody reads: the connection ends, and so does one that is closed with answers in it."""
    page = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.settimeout(DEADLINE)
        with pytest.raises(ConnectionError):
            send_without_end(connection, page * 800)


def test_two_lengths_are_refused(server: Served) -> None:
    """A second request that a proxy would not see is not answered."""
    inner = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{JSON}{AUTHORIZED}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(head.encode() + inner)
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("kind", ["silent", "half a head", "answered early", "pages that nobody reads"])
def test_many_connections_keep_nobody_out(kind: str, model: Path, key_file: str) -> None:
    """150 connections and 128 descriptors: health and a stream are answered, and nothing is written to the log."""
    sends = {
        "silent": b"",
        "half a head": b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        "answered early": request("POST /v1/completions", JSON),
        "pages that nobody reads": b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200,
    }
    with served(model, key_file, "--receive-seconds", "3600", script=LIMIT) as server, server.client() as client, ExitStack() as held:
        long: dict[str, Any] = {"model": "small", "prompt": "a", "temperature": 0, "max_tokens": 100}
        stream = client.completions.create(**long, stream=True)
        texts = [next(stream).choices[0].text]
        for _ in range(150):
            connection = held.enter_context(connected(server))
            connection.setblocking(False)
            connection.send(sends[kind])
        begin = monotonic()
        with server.http() as http:
            assert http.get("/health").json() == {"status": "ok"}
        assert monotonic() - begin < DEADLINE / 4
        texts += [event.choices[0].text for event in stream]
        alone = Alone(model)
        assert "".join(texts) == alone.text("a", 100)
        alone.close()
        code, err = server.end()
        assert (code, err) == (0, "")


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_an_answer_to_a_client_that_asks_once_is_not_cut(version: str, model: Path, key_file: str) -> None:
    """A proxy's connection, which closes behind its answer, is silent while the answer is computed, and makes room for nobody."""
    body = b'{"model": "small", "prompt": "a", "temperature": 0, "max_tokens": 150}'
    head = f"POST /v1/completions {version}\r\nhost: 127.0.0.1\r\n{JSON}{AUTHORIZED}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with served(model, key_file, "--receive-seconds", "3600", script=LIMIT) as server, connected(server) as asking, ExitStack() as held:
        asking.sendall(head.encode() + body)
        server.until("nntask_serve_texts_running", 1)
        for _ in range(150):
            held.enter_context(connected(server))
        answer = until_closed(asking)
    assert b" 200 " in answer[:20]
    assert b'"finish_reason":"length"' in answer
