"""A sandboxed process for untrusted programs, which the kernel ends when a request exceeds its limits.

A chat template and the rules of a tokenizer are programs that come with a model. They can loop forever and produce text without bound. A service
module evaluates them (`child` documents its interface) in a process of its own. For each request, ``setrlimit`` bounds the processor time in seconds
and the memory in bytes, so both limits hold even in code that checks neither. The process can open no files and has none of the secrets in the
environment.

A request that exceeds its limits raises `DataError`, and the next request starts a new process. A process that was killed or stopped by others, or
that does not start, is not the fault of a request and raises `ProcessUnavailable`.
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
"""Longest wait in seconds for the end of a killed process, which the kernel may hold for longer."""
_MOMENT: Final = 0.05
_WALL_PER_SECOND: Final = 4
"""Elapsed time for each second of processor time: the process may share its processor with three others."""
_LEAST_WALL: Final = 20
"""Shortest elapsed time in seconds: the first request also waits for the start of Python, and a busy machine serves others first."""
_PIPE: Final = 1 << 16
_AHEAD: Final = 32
_AHEAD_NBYTES: Final = 1 << 20
"""Limits on the number of unanswered requests (`_AHEAD`) and on their unsent bytes."""
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
"""Environment variables that Python needs to start and to import; the process gets no others from the environment."""
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
_OF_OTHERS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that come from outside the process: their receipt is not the fault of a request."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    Args:
        seconds: processor time, in whole seconds.
        nbytes: memory in bytes, in addition to the memory of the idle process.
        answer_nbytes: largest size of the answer, in bytes of JSON.
    """

    seconds: int
    nbytes: int
    answer_nbytes: int

    @property
    def wall_seconds(self) -> int:
        """Elapsed time in seconds after which an unanswered process counts as stopped."""
        return max(_LEAST_WALL, _WALL_PER_SECOND * self.seconds)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits that grow with the size of a request, each by a constant and a rate.

    Args:
        least: limits of a request of size 0.
        size_per_second: size that adds a second of processor time.
        nbytes_per_size: memory in bytes for each unit of size.
        answer_per_size: bytes of the answer for each unit of size.
    """

    least: RequestLimits
    size_per_second: int
    nbytes_per_size: int
    answer_per_size: int

    def limits(self, size: int) -> RequestLimits:
        """Return the limits of a request of a size."""
        least = self.least
        nbytes, answer_nbytes = least.nbytes + self.nbytes_per_size * size, least.answer_nbytes + self.answer_per_size * size
        return RequestLimits(least.seconds + size // self.size_per_second, nbytes, answer_nbytes)


@dataclass(frozen=True, slots=True)
class ConfinedRequest:
    """A request to a service.

    Args:
        content: JSON text for the service.
        limits: limits of the request.
        subject: subject of error messages; a predicate such as "takes more than 5 s of processor time" follows.
        advice: remedy at the end of error messages.
    """

    content: str
    limits: RequestLimits
    subject: str
    advice: str


class ConfinedProcess:
    """A service in a process of its own, which handles one request at a time and can be shared by threads.

    Args:
        service: name of the service's module.
        opening: first request, with the arguments of the service.
        name: noun phrase for the process in error messages, such as "the process that encodes texts".
        closed: error message for requests after the process has been closed.

    Attributes:
        facts: JSON value with which the service answered the opening request.

    Raises:
        DataError: the service refuses its arguments, or takes too much time or memory for them.
        ProcessUnavailable: the process does not start.
    """

    def __init__(self, service: str, opening: ConfinedRequest, *, name: str, closed: str) -> None:
        self._service, self._opening, self._name, self._closed = service, opening, name, closed
        self._lock, self._is_closed = threading.Lock(), False
        self._is_held = False  # whether the consumer of `answers` has an answer and has not requested the next one
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., ConfinedProcess] | None = None
        self.facts = self._start()

    def ask(self, request: ConfinedRequest) -> Any:
        """Return the answer to one request; raises the errors of `answers`."""
        (answer,) = self.answers([request])
        return answer

    def answers(self, requests: Iterable[ConfinedRequest]) -> Iterator[Any]:
        """Yield the answers to requests, sending a few requests ahead of the one that is being answered.

        Args:
            requests: requests in order; if the iterable raises, the requests before the error are answered first.

        Yields:
            JSON values, one per request, in order.

        Raises:
            DataError: the service refuses a request or fails, or the request takes too much time or memory.
            ProcessUnavailable: the process was ended or stopped by others, does not start, or has been closed.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start_again()
            yield from self._exchanged(requests)

    def close(self) -> None:
        """End the process for good, even in the middle of a request; pending requests raise `ProcessUnavailable`."""
        self._is_closed = True  # set first: a process that is being started concurrently checks this flag after it is stored
        if (process := self._process) is not None:
            process.kill()
        while not self._lock.acquire(timeout=_MOMENT):
            if self._is_held:  # an abandoned `answers` iterator holds the lock until it is collected, which also ends the process
                return
        try:
            self._end()
        finally:
            self._lock.release()

    def _start(self) -> Any:
        """Start a process and open the service; return the service's answer to the opening request."""
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nntask.confined.child", self._service],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**environment, "PYTHONPATH": path, **_ONE_THREAD},
                start_new_session=True,  # otherwise it would receive the terminal's signals
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
            (facts,) = self._exchanged([self._opening])
        except BaseException:
            self._end()
            raise
        return facts

    def _start_again(self) -> None:
        """Replace a process that has ended, or raise ProcessUnavailable. The reason goes to the log only, since clients may be remote."""
        self._end()
        if self._is_closed:
            raise ProcessUnavailable(self._closed)
        try:
            self._start()
        except ProcessUnavailable:
            raise
        except (DataError, OSError) as error:
            print(f"nntask: {self._name} does not start again: {error}", file=sys.stderr)
            raise ProcessUnavailable(f"{self._name} does not start again, and the log says why", "try again later") from None

    def _end(self) -> int | None:
        """End the process; return its exit code, None if there is no process or it has not ended yet."""
        process, self._process = self._process, None
        if self._finalizer is not None:
            self._finalizer.detach()  # otherwise it would keep a reference to the ended process
        return None if process is None else _end(process)

    def _exchanged(self, requests: Iterable[ConfinedRequest]) -> Iterator[Any]:
        """Write requests and yield their answers; end the process if a written request remains unanswered."""
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
                answer = _answer_of(kind, value, waiting.popleft())
                self._is_held = True
                yield answer
                self._is_held = False
        finally:
            self._is_held = False
            if waiting:  # otherwise a later request would receive one of these answers
                self._end()
        if failure is not None:
            raise failure

    def _read(self, pipes: _Pipes, request: ConfinedRequest) -> tuple[str, Any]:
        """Read the answer to the oldest unanswered request; return (kind, value)."""
        limits = request.limits
        try:
            line = b"" if self._is_closed else pipes.line(limits.answer_nbytes, time.monotonic() + limits.wall_seconds)
        except TimeoutError:
            raise ProcessUnavailable(f"{self._name} did not answer within {limits.wall_seconds} s, and was stopped", "try again later") from None
        if line.endswith(b"\n"):
            kind, value = json.loads(line)
            return kind, value
        what, advice = request.subject, request.advice
        if len(line) > limits.answer_nbytes:
            raise DataError(f"{what} writes more than {limits.answer_nbytes:,} bytes", advice)
        code = self._end()
        if self._is_closed:
            raise ProcessUnavailable(self._closed)
        if code == -signal.SIGXCPU:
            raise DataError(f"{what} takes more than {limits.seconds} s of processor time", advice)
        if code == -signal.SIGABRT:  # native code aborts when it gets no memory
            raise DataError(f"{what} takes more memory than it may have", advice)
        if code is None or -code in _OF_OTHERS:  # the kernel's out-of-memory killer looks the same
            raise ProcessUnavailable(f"{self._name} was stopped from outside, or because memory is short", "try again later")
        raise DataError(f"{what} ended its process with exit code {code}", advice)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a process; return its exit code, None if the kernel still holds it."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_SECONDS)
    return process.returncode


class _Pipes:
    """The two pipes of a process, used so that a full one never blocks the other.

    Attributes:
        num_unsent: number of bytes that are still to be written.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._unsent, self._found = deque[memoryview](), bytearray()
        self.num_unsent = 0

    def send(self, line: bytes) -> None:
        """Queue a line, and write as much as the pipe takes without blocking."""
        self._unsent.append(memoryview(line))
        self.num_unsent += len(line)
        self._write()

    def line(self, most: int, until: float) -> bytes:
        """Read a line, and write queued lines meanwhile.

        Args:
            most: number of bytes after which reading stops without the end of the line.
            until: monotonic time at which reading gives up.

        Returns:
            The line; part of a line if the process has ended or the line is longer than `most` bytes.

        Raises:
            TimeoutError: the line is not complete at the time `until`.
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
            except BrokenPipeError:  # the process has ended, which the reader will notice
                self._unsent.clear()
                self.num_unsent = 0
                return
            self.num_unsent -= count
            if count == len(line):
                self._unsent.popleft()
            else:
                self._unsent[0] = line[count:]


def _answer_of(kind: str, value: Any, request: ConfinedRequest) -> Any:
    """Return the value of an answer; raise DataError if the service has refused the request or failed at it."""
    if kind == "answer":
        return value
    if kind == "refused":
        raise DataError(value)
    if kind == "memory":
        raise DataError(f"{request.subject} takes more memory than it may have", request.advice)
    raise DataError(f"{request.subject} fails: {value}", request.advice)
