"""Clients of a server that behave: each asks, reads its answer, and asks again on a new connection."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic
from typing import Any, Final

from support.deadline import DEADLINE
from support.rude_clients import address
from support.served import KEY

_HEALTH_PACE: Final = 0.1
_GREEDY: Final[dict[str, Any]] = {"model": "small", "temperature": 0}
_CHAT: Final[dict[str, Any]] = {**_GREEDY, "messages": [{"role": "user", "content": "hello"}]}
ASKED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "completion": ("/v1/completions", {**_GREEDY, "prompt": "once upon", "max_tokens": 20}),
    "streamed completion": ("/v1/completions", {**_GREEDY, "prompt": "a", "max_tokens": 100, "stream": True}),
    "chat": ("/v1/chat/completions", {**_CHAT, "max_tokens": 20}),
    "streamed chat": ("/v1/chat/completions", {**_CHAT, "max_tokens": 50, "stream": True}),
}
"""Kinds of honest requests: path and body."""


def answered(url: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str, float]:
    """Ask on a new connection; returns the status, the text of the answer, and the seconds until it was whole."""
    begin = monotonic()
    connection = http.client.HTTPConnection(*address(url), timeout=DEADLINE)
    try:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "connection": "close"}
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    return response.status, text, monotonic() - begin


def text_in(answer: str) -> str:
    """The text of a whole answer, or of the events of a stream, which must be complete."""
    if not answer.startswith("data: "):
        choice = json.loads(answer)["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    *events, done = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert done == "[DONE]", answer
    choices = [json.loads(event)["choices"][0] for event in events]
    return "".join(each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices)


@dataclass(slots=True)
class Seen:
    """What honest clients have seen.

    Attributes:
        texts: kind of request -> texts that came.
        seconds: durations of the requests for ``/health``.
        faults: what went wrong.
    """

    texts: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in ASKED})
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@contextmanager
def honest_clients(url: str) -> Iterator[Seen]:
    """A client of each kind, and one that asks for the health of the server ten times a second, until the block ends."""
    seen, ended = Seen(), Event()

    def ask(kind: str) -> None:
        while not ended.is_set():
            status, text, _ = answered(url, *ASKED[kind])
            if status != 200:
                raise AssertionError(f"{status} {text}")
            seen.texts[kind].append(text_in(text))

    def look() -> None:
        while not ended.wait(_HEALTH_PACE):
            status, text, seconds = answered(url, "/health")
            seen.seconds.append(seconds)
            if (status, text) != (200, '{"status":"ok"}'):
                raise AssertionError(f"{status} {text}")

    def guarded(work: Any, *arguments: str) -> None:
        try:
            work(*arguments)
        except Exception as error:  # told by the test
            seen.faults.append(f"{arguments}: {error!r}")

    threads = [Thread(target=guarded, args=(look,)), *(Thread(target=guarded, args=(ask, kind)) for kind in ASKED)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        for thread in threads:
            thread.join()
