"""Connections that are held: silent, slow, never read, or too many; clients who behave are answered meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.deadline import DEADLINE
from support.honest_clients import ASKED, answered, text_in
from support.rude_clients import AUTHORIZED, EARLY, HELD, JSON, MORE_HELD, address, answered_early, held, request
from support.served import Alone, Served, served

from wrappers.serve.server import listening

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
"""What a server's process runs first."""


@pytest.fixture(scope="module")
def server(model: Path, key_file: str) -> Iterator[Served]:
    """A server that waits two seconds for clients."""
    with served(model, key_file, "--receive-seconds", "2", "--slots", "2") as found:
        yield found


@contextmanager
def connected(server: Served) -> Iterator[socket.socket]:
    """A connection to a server."""
    with socket.create_connection(address(server.url), DEADLINE) as found:
        yield found


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
    with connected(server) as connection:
        connection.sendall(answered_early(status))
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


def test_requests_that_come_at_once_are_answered_in_order(server: Served) -> None:
    """Also in pieces that end anywhere, with a body that is not read, and behind the last one the connection closes."""
    paths = ["/health", "/nothing", "/health", "/metrics"] * 20
    heads = [f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{AUTHORIZED}content-length: 3\r\n\r\nabc" for path in paths]
    sent = "".join([*heads, "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"]).encode()
    with connected(server) as connection:
        for begin in range(0, len(sent), 777):
            connection.sendall(sent[begin : begin + 777])
        answers = until_closed(connection)
    statuses = [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [404 if path == "/nothing" else 200 for path in paths] + [200]


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


KINDS = HELD | MORE_HELD
UNREAD = KINDS.pop("answers that nobody reads")
"""Texts of clients with the key, behind which texts of others wait."""
FEW = ("silent", "half a head", "answered early, 401", "pages that nobody reads")


@pytest.mark.parametrize("kind", [pytest.param(each, marks=() if each in FEW else pytest.mark.long) for each in KINDS])
def test_many_connections_keep_nobody_out(kind: str, model: Path, alone: Alone, key_file: str) -> None:
    """150 connections and 128 descriptors: health, new clients and a stream that runs are answered, and nothing is written to the log."""
    with served(model, key_file, "--receive-seconds", "3600", "--slots", "4", script=LIMIT) as server, server.client() as client:
        stream = client.completions.create(model="small", prompt="a", temperature=0, max_tokens=100, stream=True)
        texts = [next(stream).choices[0].text]
        with held(server.url, KINDS[kind], 150):
            for _ in range(5):
                assert answered(server.url, "/health")[:2] == (200, '{"status":"ok"}')
                status, answer, _ = answered(server.url, *ASKED["completion"])
                assert status == 200
                assert text_in(answer) == alone.text("once upon", 20)
            texts += [event.choices[0].text for event in stream]
            assert "".join(texts) == alone.text("a", 100)
        assert server.end() == (0, "")


@pytest.mark.long
def test_texts_that_fill_the_queue_leave_room_for_others(model: Path, key_file: str) -> None:
    """150 clients with the key, 128 descriptors and a queue that is longer: 16 connections have no texts, and health is answered."""
    flags = (key_file, "--queue", "1000", "--slots", "1", "--grace-seconds", "0")
    with served(model, *flags, script=LIMIT) as server, held(server.url, UNREAD, 150):
        server.until("nntask_serve_texts_running", 1)
        for _ in range(5):
            assert answered(server.url, "/health")[0] == 200
            assert server.metric("nntask_serve_texts_") <= 128 - 32 - 16
        code, err = server.end()
    assert code == 0
    assert err.startswith("nntask: at most ")
    assert err.count("\n") == 1


def test_connections_send_what_is_written_at_once() -> None:
    """The parts of an answer do not wait for acknowledgements of the parts before."""
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), DEADLINE), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


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
