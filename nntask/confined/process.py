"""A process that works on a program of others, and that the kernel ends when a request takes too much of it.

A chat template or the rules of a tokenizer are programs that came with a model: loops without end and texts without bound are in their reach. A
service is a module with a class `Service` that does such work (`child` says what it has to look like). It runs in a process that has a number of
seconds of a processor and a number of bytes for each request (``setrlimit``), so both limits hold even where no code looks at them. It can open no
file and has none of the environment's secrets.

A request that takes too much is refused with `DataError`; the next one starts another process. A process that was killed or stopped by others, or
does not start, is no fault of a request: `ProcessUnavailable`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..errors import DataError, ProcessUnavailable

_LAST_SECONDS: Final = 5
"""Time that a killed process has to be gone; the kernel may hold it for longer, and then it is not waited for."""
_MOMENT: Final = 0.05
_PIPE: Final = 1 << 16
_AHEAD: Final = 32
_AHEAD_NBYTES: Final = 1 << 20
"""Requests, and their bytes, that are written before the first of them is answered."""
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
"""Variables of the environment that Python needs to start and to import."""
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
_OF_OTHERS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a process does not end itself with."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Args:
        seconds: whole seconds of a processor.
        nbytes: memory, in bytes, beyond that which the process has when it is ready.
        answer_nbytes: largest answer in bytes of JSON.
        wall_seconds: time in which a request is answered, or its process counts as stopped.
    """

    seconds: int
    nbytes: int
    answer_nbytes: int
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class Subject:
    """Words for a request that takes too much.

    Args:
        what: subject of a sentence that goes on with "takes more than 5 s of a processor".
        advice: the end of that sentence.
    """

    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class Wording:
    """Words for a process.

    Args:
        name: the process in messages, such as "the process that writes conversations down".
        closed: message for requests after the process has been closed.
    """

    name: str
    closed: str


@dataclass(frozen=True, slots=True)
class ConfinedRequest:
    """A request.

    Args:
        content: JSON for the service.
        limits: limits of the request.
        subject: words for it.
    """

    content: str
    limits: RequestLimits
    subject: Subject


class ConfinedProcess:
    """A service in a process of its own; it does one request at a time, whatever the number of threads that ask.

    Args:
        service: module of the service.
        opening: arguments of the service, as a request.
        wording: words for the process.

    Attributes:
        facts: JSON value that the service told when it was opened.

    Raises:
        DataError: the service refuses its arguments, or takes too much time or memory for them.
        ProcessUnavailable: the process does not start.
    """

    def __init__(self, service: str, opening: ConfinedRequest, wording: Wording) -> None:
        self._service, self._opening, self._wording = service, opening, wording
        self._lock, self._is_closed = threading.Lock(), False
        self._is_held = False  # whether the caller has an answer and has not asked for the next one
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., ConfinedProcess] | None = None
        self.facts = self._start()

    def ask(self, request: ConfinedRequest) -> Any:
        """Return the answer to one request; errors as of `answers`."""
        (answer,) = self.answers([request])
        return answer

    def answers(self, requests: Iterable[ConfinedRequest]) -> Iterator[Any]:
        """Ask for answers, a few requests ahead of the one that is answered.

        Args:
            requests: requests; an error of the iterable is raised after the answers to those before it.

        Yields:
            JSON values, in order.

        Raises:
            DataError: the service refuses a request or fails at it, or it takes too much time or memory.
            ProcessUnavailable: the process was ended or stopped by others, does not start, or has been closed.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start_again()
            yield from self._exchanged(requests)

    def close(self) -> None:
        """End the process for good, also in the middle of a request; requests that wait are refused."""
        self._is_closed = True  # before the process is read: one that starts at the same time looks here after it is written
        if (process := self._process) is not None:
            process.kill()
        while not self._lock.acquire(timeout=_MOMENT):
            if self._is_held:  # answers that nobody takes hold the lock until they are collected, which ends the process, too
                return
        try:
            self._end()
        finally:
            self._lock.release()

    def _start(self) -> Any:
        """Start a process and open the service; returns what the service tells."""
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nntask.confined.child", self._service],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**environment, "PYTHONPATH": path, **_ONE_THREAD},
                start_new_session=True,  # else the signals of a terminal would reach it
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
            (facts,) = self._exchanged([self._opening])
        except BaseException:
            self._end()
            raise
        return facts

    def _start_again(self) -> None:
        """Replace a process that has ended; the log says why there is none, clients are only told that there is none.

        Raises:
            ProcessUnavailable: there is none.
        """
        self._end()
        if self._is_closed:
            raise ProcessUnavailable(self._wording.closed)
        try:
            self._start()
        except ProcessUnavailable:
            raise
        except (DataError, OSError) as error:
            print(f"nntask: {self._wording.name} does not start again: {error}", file=sys.stderr)
            raise ProcessUnavailable(f"{self._wording.name} does not start again, and the log says why; try again later") from None

    def _end(self) -> int | None:
        """End the process; returns its code, None if there is none yet."""
        process, self._process = self._process, None
        if self._finalizer is not None:
            self._finalizer.detach()  # else it would keep a process that has ended
        return None if process is None else _end(process)

    def _exchanged(self, requests: Iterable[ConfinedRequest]) -> Iterator[Any]:
        """Write requests and yield their answers; ends the process if one that was written is not answered."""
        assert self._process is not None
        pipes, waiting = _Pipes(self._process), deque[ConfinedRequest]()
        source, failure = iter(requests), None
        try:
            while True:
                while failure is None and len(waiting) < _AHEAD and pipes.num_unsent < _AHEAD_NBYTES:
                    try:
                        request = next(source)
                    except StopIteration:
                        break
                    except Exception as error:
                        failure = error
                        break
                    waiting.append(request)
                    pipes.send(f"[{request.limits.seconds}, {request.limits.nbytes}, {request.content}]\n".encode())
                if not waiting:
                    break
                kind, value = self._read(pipes, waiting[0])
                answer = _answer_of(kind, value, waiting.popleft().subject)
                self._is_held = True
                yield answer
                self._is_held = False
        finally:
            self._is_held = False
            if waiting:  # else the next request would get an answer of these
                self._end()
        if failure is not None:
            raise failure

    def _read(self, pipes: _Pipes, request: ConfinedRequest) -> tuple[str, Any]:
        """Read the answer to the oldest request that was written: its kind, and a value."""
        limits = request.limits
        try:
            line = b"" if self._is_closed else pipes.line(limits.answer_nbytes, time.monotonic() + limits.wall_seconds)
        except TimeoutError:
            raise ProcessUnavailable(f"{self._wording.name} did not answer within {limits.wall_seconds:g} s, and is ended; try again later") from None
        if line.endswith(b"\n"):
            kind, value = json.loads(line)
            return kind, value
        what, advice = request.subject.what, request.subject.advice
        if len(line) > limits.answer_nbytes:
            raise DataError(f"{what} writes more than {limits.answer_nbytes:,} bytes; {advice}")
        code = self._end()
        if self._is_closed:
            raise ProcessUnavailable(self._wording.closed)
        if code == -signal.SIGXCPU:
            raise DataError(f"{what} takes more than {limits.seconds} s of a processor; {advice}")
        if code == -signal.SIGABRT:  # code outside Python ends so when it gets no memory
            raise DataError(f"{what} takes more memory than it may have; {advice}")
        if code is None or -code in _OF_OTHERS:  # the kernel's own SIGKILL when memory is short looks the same
            raise ProcessUnavailable(f"{self._wording.name} was ended by others, or as memory is short; try again later")
        raise DataError(f"{what} takes more than its process has, which has ended with code {code}; {advice}")


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a process; returns its code, None if the kernel still holds it."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_SECONDS)
    return process.returncode


class _Pipes:
    """The pipes of a process, of which neither blocks the other.

    Attributes:
        num_unsent: bytes that are still to be written.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._unsent, self._found = deque[memoryview](), bytearray()
        self.num_unsent = 0

    def send(self, line: bytes) -> None:
        """Write a line, as far as the process takes it now."""
        self._unsent.append(memoryview(line))
        self.num_unsent += len(line)
        self._write()

    def line(self, most: int, until: float) -> bytes:
        """Read a line, or a part of it if the process ends or the line is longer than `most` bytes; writes meanwhile.

        Raises:
            TimeoutError: neither happens before the monotonic time `until`.
        """
        end, searched = -1, 0
        with selectors.PollSelector() as pipes:
            pipes.register(self._output, selectors.EVENT_READ)
            while (end := self._found.find(b"\n", searched)) < 0 and len(self._found) <= most:
                searched = len(self._found)
                if self._unsent and self._input not in pipes.get_map():
                    pipes.register(self._input, selectors.EVENT_WRITE)
                if (seconds := until - time.monotonic()) <= 0:
                    raise TimeoutError
                for key, _ in pipes.select(seconds):
                    if key.fd == self._input:
                        self._write()
                        if not self._unsent:
                            pipes.unregister(self._input)
                    elif piece := os.read(self._output, _PIPE):
                        self._found += piece
                    else:
                        return bytes(self._found)
        end = len(self._found) if end < 0 else end + 1
        line = bytes(self._found[:end])
        del self._found[:end]
        return line

    def _write(self) -> None:
        while self._unsent:
            line = self._unsent[0]
            try:
                count = os.write(self._input, line[:_PIPE])
            except BlockingIOError:
                return
            except BrokenPipeError:  # the process has ended, which reading tells
                self._unsent.clear()
                self.num_unsent = 0
                return
            self.num_unsent -= count
            if count == len(line):
                self._unsent.popleft()
            else:
                self._unsent[0] = line[count:]


def _answer_of(kind: str, value: Any, subject: Subject) -> Any:
    """Return the value of an answer.

    Raises:
        DataError: the service has refused the request or failed at it.
    """
    if kind == "answer":
        return value
    if kind == "refused":
        raise DataError(value)
    if kind == "memory":
        raise DataError(f"{subject.what} takes more memory than it may have; {subject.advice}")
    raise DataError(f"{subject.what} fails: {value}; {subject.advice}")
