"""A chat template in a process of its own, which the kernel ends when a conversation takes too much of it.

A template is a program that came with a model. Jinja's sandbox keeps it from files and from Python's objects, but not from loops without end or texts
without bound, in statements, in filters and already where constants are folded as it is compiled. So it is compiled and rendered in a process that
has so many seconds of a processor for each conversation and so much memory (``setrlimit``): both end it even where nobody looks at it any more, and
the next conversation begins another one. Should the sandbox leak, the process can open no file, has none of the environment's secrets, and is what
the kernel ends first where memory is short. The two sides speak in lines of JSON; `main` is the other side.

A conversation that takes too much is refused with `DataError`. A process that was killed or stopped by others, or does not begin again, is no fault
of a conversation: `TemplateUnavailable`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from nntask import DataError
from nntask.data import ChatSource, ChatTemplate

from .errors import TemplateUnavailable

CPU_SECONDS: Final = 5
"""Of a processor, for compiling and for each conversation."""
WALL_SECONDS: Final = 4 * CPU_SECONDS
"""In which one is answered, or its process is taken to be stopped."""
_LAST_SECONDS: Final = 5
"""That a killed process has to be gone; the kernel may hold it for longer, and then nobody waits for it."""
LONGEST: Final = 16 << 20
"""Most characters of any conversation, so that no limit of a request's size gives a template more than 768 MiB."""
_NBYTES: Final = 256 << 20
_NBYTES_A_CHARACTER: Final = 32
"""Memory that a text takes while it is made: pieces, their sum, JSON and its bytes."""
_LONGEST_ERROR: Final = 1000
_JSON_A_CHARACTER: Final = 12
"""Most bytes of a character in JSON's ASCII, a surrogate pair."""
_PIPE: Final = 1 << 16
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
"""What Python needs of the environment to start and to import."""
_IMPORTED: Final = ("nntask.data.chat_blocks", "jinja2.constants", "jinja2.debug", "textwrap", "encodings.unicode_escape")
"""What compiling and rendering import at times, when no file can be opened any more."""
_NUM_FILES: Final = 3
"""That the process has open, and no more: its pipes and stderr."""
_OF_OTHERS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a process does not end itself with."""

_CLOSED: Final = "conversations are not written down any more, as the server is shutting down; ask another one, or this one later"


class TemplateProcess:
    """Writes conversations down; one at a time, whoever asks.

    Args:
        source: the template.
        most: characters of a conversation, given and written; never more than `LONGEST`.
        now: the date that the template is told with each conversation.
        cpu_seconds: a whole number.
        wall_seconds: for compiling and for each conversation.

    Raises:
        DataError: the template has a mistake, or takes too much time or memory already where it is compiled.
    """

    def __init__(
        self,
        source: ChatSource,
        most: int,
        now: Callable[[], datetime] = datetime.now,
        cpu_seconds: int = CPU_SECONDS,
        wall_seconds: float = WALL_SECONDS,
    ) -> None:
        self._source, self._most, self._seconds, self._wall_seconds = source, min(most, LONGEST), cpu_seconds, wall_seconds
        self._now = now
        self._nbytes = _NBYTES + self._most * _NBYTES_A_CHARACTER
        self._lock, self._is_closed = threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    def prompt(self, messages: Sequence[Mapping[str, str]], where: str) -> str:
        """The text of a conversation up to where the assistant's next answer begins.

        Args:
            where: the conversation is from, for messages.

        Raises:
            DataError: the template refuses it, fails at it, writes too much, or takes too much time or memory.
            TemplateUnavailable: the process was ended or stopped by others, does not begin again, or has been closed.
        """
        what = f"{where} is not for the chat template of {self._source.name}"
        if (count := sum(len(word) for message in messages for pair in message.items() for word in pair)) > self._most:
            raise DataError(f"{what}, which gets at most {self._most:,} characters, got {count:,}; change the messages")
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._begin_again()
            return self._told([list(messages), where, self._now().isoformat()], f"{what}, which takes", "change the messages")

    def close(self) -> None:
        """End the process for good, also under a conversation that is being written; those that wait are refused."""
        self._is_closed = True  # before the process is read: one that begins beside this looks here after it is written
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _begin(self) -> None:
        """A new process that compiles the template."""
        path, source = os.pathsep.join(each or os.getcwd() for each in sys.path), self._source
        terms = [source.source, source.name, dict(source.words), self._most, self._seconds, self._nbytes]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "wrappers.serve.template_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**{name: os.environ[name] for name in _KEPT if name in os.environ}, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # else the signals of a terminal would reach it
            )
            self._told(terms, f"the chat template of {source.name} takes", "name another with --chat-template FILE")
        except BaseException:
            self._end()
            raise

    def _begin_again(self) -> None:
        """A new process instead of one that has ended; why there is none is for who runs the server, not for clients.

        Raises:
            TemplateUnavailable: there is none.
        """
        self._end()
        if self._is_closed:
            raise TemplateUnavailable(_CLOSED)
        try:
            self._begin()
        except TemplateUnavailable:
            raise
        except (DataError, OSError) as error:
            print(f"nntask: the process of the chat template does not begin again: {error}", file=sys.stderr)
            why = "the process that writes conversations down does not begin again, and why stands in the server's log; try again later"
            raise TemplateUnavailable(why) from None

    def _end(self) -> int | None:
        """End the process; returns its code, None where there is none yet."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_SECONDS)
        return process.returncode

    def _told(self, line: Any, what: str, advice: str) -> str:
        """The answer to a line; `what` and `advice` are for a process that dies of it."""
        try:
            found = self._exchanged(json.dumps(line).encode() + b"\n")
        except TimeoutError:
            self._end()
            why = f"the process that writes conversations down did not answer within {self._wall_seconds:g} s, and is ended; try again later"
            raise TemplateUnavailable(why) from None
        except BaseException:  # or the next conversation would get the answer of this one
            self._end()
            raise
        if not found.endswith(b"\n"):
            raise self._why_ended(self._end(), what, advice)
        answer = json.loads(found)
        if "error" in answer:
            raise DataError(answer["error"])
        return str(answer["text"])

    def _exchanged(self, line: bytes) -> bytes:
        """Write a line and read the one that answers it, or what there is of it when the process ends.

        Raises:
            TimeoutError: neither happens in time.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None  # they are pipes
        assert process.stdout is not None
        if self._is_closed:
            return b""
        until, most = time.monotonic() + self._wall_seconds, _JSON_A_CHARACTER * (self._most + _LONGEST_ERROR)
        left, found = memoryview(line), bytearray()
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.PollSelector() as pipes:
            pipes.register(process.stdin, selectors.EVENT_WRITE)
            pipes.register(process.stdout, selectors.EVENT_READ)
            while not found.endswith(b"\n") and len(found) <= most:
                if (seconds := until - time.monotonic()) <= 0:
                    raise TimeoutError
                for key, _ in pipes.select(seconds):
                    if key.fileobj is process.stdout:
                        if not (piece := os.read(key.fd, _PIPE)):
                            return bytes(found)
                        found += piece
                        continue
                    try:
                        left = left[os.write(key.fd, left[:_PIPE]) :]
                    except BrokenPipeError:  # it has ended, which reading tells
                        left = left[:0]
                    if not left:
                        pipes.unregister(process.stdin)
        return bytes(found)

    def _why_ended(self, code: int | None, what: str, advice: str) -> DataError:
        """Why a process has ended without an answer."""
        if self._is_closed:
            return TemplateUnavailable(_CLOSED)
        if code == -signal.SIGXCPU:
            return DataError(f"{what} more than {self._seconds} s of a processor; {advice}")
        if code is None or -code in _OF_OTHERS:  # the kernel's own SIGKILL where memory is short looks the same
            return TemplateUnavailable("the process that writes conversations down was ended by others, or as memory is short; try again later")
        return DataError(f"{what} more than its process has, which has ended with code {code}; {advice}")


def main() -> None:
    """The process: a line with the template and its limits, then one for each conversation, until there are no more."""
    source, name, words, most, seconds, nbytes = json.loads(sys.stdin.readline())
    _confine(nbytes)
    found: list[ChatTemplate] = []

    def compiled() -> str:
        found.append(ChatTemplate(source, name, words))
        return ""

    _answer(compiled, seconds, most, f"the chat template of {name}", "name another with --chat-template FILE")
    for line in sys.stdin:
        messages, where, now = json.loads(line)

        def rendered(messages: Any = messages, where: str = where, now: str = now) -> str:
            found[0].set_date(datetime.fromisoformat(now))
            return found[0].prompt(messages, where)

        _answer(rendered, seconds, most, f"{where} is not for the chat template of {name}, which", "change the messages")


def _answer(work: Callable[[], str], seconds: int, most: int, what: str, advice: str) -> None:
    """Write the line that tells what `work` gives, or why it gives nothing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)
    try:
        text = work()
        if len(text) > most:
            raise DataError(f"{what} writes {len(text):,} characters of at most {most:,}; {advice}")
        line = json.dumps({"text": text})
    except DataError as error:
        line = json.dumps({"error": str(error)[:_LONGEST_ERROR]})
    except MemoryError:
        line = json.dumps({"error": f"{what} takes more memory than it may have; {advice}"})
    except Exception as error:  # Jinja's compiler and its filters raise whatever they like
        line = json.dumps({"error": f"{what} fails: {type(error).__name__}; {advice}"})
    print(line, flush=True)


def _confine(nbytes: int) -> None:
    """Take from this process what a template needs not: files, and all memory but so many bytes more."""
    with contextlib.suppress(ImportError):  # without Jinja the template says so
        for name in _IMPORTED:
            importlib.import_module(name)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where memory is short the kernel ends this process rather than the server
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _taken() + nbytes)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_NUM_FILES, _NUM_FILES))


def _limit(kind: int, soft: int) -> None:
    """Limit what this process may use, at most as far as others have limited it."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _taken() -> int:
    """Bytes of addresses that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
