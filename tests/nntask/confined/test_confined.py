"""Confined processes: what a program in one of them can reach, and what a request that goes wrong leaves behind."""

from __future__ import annotations

import errno
import gc
import json
import threading
import weakref
from collections.abc import Iterator

import pytest

from nntask.confined.process import ConfinedProcess, ConfinedRequest, RequestLimits
from nntask.errors import DataError, ProcessUnavailable

LIMITS = RequestLimits(15, 32 << 20, 10_000)
FULL = f"OSError {errno.EMFILE}"


def request(content: str) -> ConfinedRequest:
    """A request."""
    return ConfinedRequest(json.dumps(content), LIMITS, "the attempt", "try another")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfinedProcess]:
    """A process that tries to get out."""
    monkeypatch.setenv("NNTASK_API_KEY", "secret")
    found = ConfinedProcess("support.escaping_service", request("open"), name="the process of the test", closed="closed")
    yield found
    found.close()


@pytest.mark.parametrize("attempt", ["read the server's environment", "read a file", "write a file", "open a socket", "free a descriptor"])
def test_nothing_can_be_opened(attempt: str, process: ConfinedProcess) -> None:
    """No file and no socket, also where a descriptor has become free."""
    assert process.ask(request(attempt)) == FULL
    assert process.ask(request("own environment")) == "[]"


def test_a_process_that_exits(process: ConfinedProcess) -> None:
    """Its request is refused, those ahead of it are answered, and the next one gets another process."""
    found = process.answers(map(request, ["own environment", "exit", "own environment"]))
    assert next(found) == "[]"
    with pytest.raises(DataError, match="the attempt ended its process with exit code 3; try another"):
        next(found)
    assert process.ask(request("own environment")) == "[]"


def test_a_busy_machine_ends_no_short_request() -> None:
    """A second of processor time may take many where others work, as may the start of Python; long requests get a quarter of a processor."""
    assert [RequestLimits(seconds, 0, 0).wall_seconds for seconds in (1, 5, 15)] == [20, 20, 60]


def test_an_answer_beyond_its_limit(process: ConfinedProcess) -> None:
    """It is not read, and not taken for the answer of the next request."""
    with pytest.raises(DataError, match="the attempt writes more than 10,000 bytes; try another"):
        process.ask(request("say much"))
    assert process.ask(request("own environment")) == "[]"


def test_answers_that_nobody_takes(process: ConfinedProcess) -> None:
    """A caller who stops early does not leave its answers to the next one."""
    found = process.answers(map(request, ["read a file", "read a file", "own environment"]))
    next(found)
    found.close()
    assert process.ask(request("own environment")) == "[]"


def test_a_process_is_closed_under_answers_that_nobody_takes(process: ConfinedProcess) -> None:
    """Closing does not wait for them, and those that are asked for later are refused."""
    found = process.answers(map(request, ["read a file", "read a file"]))
    next(found)
    closing = threading.Thread(target=process.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(ProcessUnavailable, match="closed"):
        next(found)


def test_ended_processes_are_let_go(process: ConfinedProcess) -> None:
    """A process that has been replaced is kept by nobody."""
    first = weakref.ref(process._process)
    for _ in range(2):
        with pytest.raises(DataError, match="code 3"):
            process.ask(request("exit"))
    gc.collect()
    assert first() is None


def test_an_unknown_request_is_a_failure(process: ConfinedProcess) -> None:
    """An error of the service names its type and ends nothing."""
    with pytest.raises(DataError, match="the attempt fails: KeyError; try another"):
        process.ask(request("no attempt"))
    assert process.ask(request("own environment")) == "[]"
