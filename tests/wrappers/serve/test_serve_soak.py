"""A soak of the server: rude clients of every kind for a while, honest ones beside them, and what is left of the rude ones afterwards.

Seconds are asserted here: that a health check is answered within one is what the server promises. A busy machine is allowed for by the same measure
taken without rude clients.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import psutil
import pytest
from support.deadline import DEADLINE
from support.honest_clients import ASKED, answered, honest_clients, text_in
from support.rude_clients import HELD, MORE_HELD, MOVING, crowd, held
from support.served import Served, served

pytestmark = pytest.mark.long
SECONDS = 1.0
"""In which health must be answered, whoever holds connections."""
SOAK_SECONDS = 30.0
GRACE_SECONDS = 4
MARGIN_SECONDS = 5
"""That clients have to read what they are told after the grace time."""
MOST_GROWTH = 32 << 20
"""Bytes that the server may keep of the clients that it has had."""
STATE = """
import asyncio, os, resource, signal
resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))
def tell(*_):
    with open({file!r} + ".new", "w") as file:
        file.write(str(len(asyncio.all_tasks())))
    os.replace({file!r} + ".new", {file!r})
signal.signal(signal.SIGUSR1, tell)
"""
"""What a server's process runs first: it limits its descriptors, and writes the number of its tasks into a file at SIGUSR1."""


def script(descriptors: int, file: Path) -> str:
    """What a server's process runs first."""
    return STATE.format(descriptors=descriptors, file=str(file))


def worst(url: str, *asked: Any) -> float:
    """The longest of ten answers to a request, in seconds."""
    found = [answered(url, *asked) for _ in range(10)]
    assert {status for status, _, _ in found} == {200}
    return max(seconds for _, _, seconds in found)


@pytest.mark.parametrize("kind", HELD | MORE_HELD)
def test_held_connections_delay_nobody(kind: str, model: Path, key_file: str, tmp_path: Path) -> None:
    """150 connections and 128 descriptors: health and a new client are answered within a second."""
    with served(model, key_file, "--receive-seconds", "3600", script=script(128, tmp_path / "state")) as server:
        requests: dict[str, tuple[Any, ...]] = {"health": ("/health",), "completion": ASKED["completion"]}
        if kind == "answers that nobody reads":  # texts of clients with the key, behind which others wait
            del requests["completion"]
        quiet = {name: worst(server.url, *asked) for name, asked in requests.items()}
        with held(server.url, (HELD | MORE_HELD)[kind], 150):
            for name, asked in requests.items():
                seconds = worst(server.url, *asked)
                print(f"{kind:28} {name:12} {seconds:.3f} s, alone {quiet[name]:.3f} s")
                assert seconds <= SECONDS + quiet[name]


class Observed:
    """The state of a server's process, from outside.

    Args:
        file: where the process writes the number of its tasks.
    """

    def __init__(self, server: Served, file: Path) -> None:
        self._process, self._file = psutil.Process(server.process.pid), file

    def __call__(self) -> dict[str, int]:
        """Descriptors, threads, tasks and bytes of memory."""
        self._file.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        end = monotonic() + DEADLINE
        while not self._file.exists():
            assert monotonic() < end
        tasks = int(self._file.read_text())
        return {
            "descriptors": self._process.num_fds(),
            "threads": self._process.num_threads(),
            "tasks": tasks,
            "bytes": self._process.memory_info().rss,
        }


def until_as_before(observe: Callable[[], dict[str, int]], most: dict[str, int]) -> dict[str, int]:
    """Look at a server until nothing of it is above a bound; returns what was seen last."""
    end, found = monotonic() + DEADLINE, observe()
    while any(found[name] > most[name] for name in most) and monotonic() < end:
        Event().wait(0.2)
        found = observe()
    return found


@pytest.fixture(scope="module")
def expected(model: Path, key_file: str) -> Iterator[dict[str, str]]:
    """The text that each kind of honest request gets from a server without other clients."""
    with served(model, key_file) as server:
        yield {kind: text_in(answered(server.url, *asked)[1]) for kind, asked in ASKED.items()}


@pytest.mark.parametrize("descriptors", [128, 1024])
def test_rude_clients_cost_honest_ones_nothing(descriptors: int, model: Path, key_file: str, expected: dict[str, str], tmp_path: Path) -> None:
    """Honest requests are answered as if alone and health within a second; nothing of the rude ones stays; the end comes in time, with them there.

    With few descriptors connections make room for each other, with many each is closed by its own limit of time.
    """
    kinds, file = HELD | MORE_HELD | MOVING, tmp_path / "state"
    flags = (key_file, "--receive-seconds", "3", "--grace-seconds", str(GRACE_SECONDS), "--slots", "4")
    with served(model, *flags, script=script(descriptors, file)) as server:
        observe = Observed(server, file)
        for count in (4, 2):  # steps for as many texts are recorded
            assert answered(server.url, "/v1/completions", {"model": "small", "prompt": "a", "n": count, "max_tokens": 100})[0] == 200
        with honest_clients(server.url) as quiet:
            Event().wait(SOAK_SECONDS / 6)
        before = observe()
        with honest_clients(server.url) as seen, crowd(server.url, kinds, each=8) as num_connections:
            Event().wait(SOAK_SECONDS)
        print(json.dumps({"quiet": max(quiet.seconds), "soak": max(seen.seconds), "health": len(seen.seconds)}))
        print(json.dumps({kind: len(texts) for kind, texts in seen.texts.items()}), dict(num_connections))
        assert (quiet.faults, seen.faults) == ([], [])
        assert all(num_connections[kind] >= 8 for kind in kinds)
        for kind, text in expected.items():
            assert set(seen.texts[kind]) == {text}
        assert max(seen.seconds) <= SECONDS + max(quiet.seconds)
        pool = min(32, (os.cpu_count() or 1) + 4)  # threads of asyncio's own, which stay
        most = {**before, "threads": before["threads"] + pool, "bytes": before["bytes"] + MOST_GROWTH}
        after = until_as_before(observe, most)
        print(before, after)
        assert all(after[name] <= most[name] for name in most), (before, after)
        with crowd(server.url, kinds, each=4) as num_connections:
            end = monotonic() + DEADLINE
            while not all(num_connections[kind] >= 4 for kind in kinds):
                assert monotonic() < end
            begin = monotonic()
            code, err = server.end()
            seconds = monotonic() - begin
        print(f"end after {seconds:.1f} s", err)
        assert (code, err) == (0, "")
        assert seconds <= GRACE_SECONDS + MARGIN_SECONDS + SECONDS + max(quiet.seconds)
