"""Standard output of the command, which may be closed, full, in a limited encoding, or a pipe without a reader.

Everything that a command prints goes through `Output`, so that a failed write of it differs from a failed write of a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TextIO

_SHORT: Final = 1000


def open_missing() -> None:
    """Open the null device for each standard stream that was closed at the start of the process, lowest number first.

    Otherwise another file would get the number of the closed stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives


class Output:
    """A replacement for `sys.stdout` that raises failed writes as errors of the command; only a closed pipe keeps its exception.

    Raises:
        StorageError: `write` or `flush` failed.
        BrokenPipeError: the reader of the pipe has ended; raised by `write` and `flush`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, with a question mark for each character that the stream's encoding lacks; returns its length."""
        with _failures():
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:
                return self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))

    def flush(self) -> None:
        """Write the buffered text."""
        with _failures():
            self._stream.flush()

    def discard(self) -> None:
        """Discard the buffered text and all later output."""
        with contextlib.suppress(OSError, ValueError):  # a stream in memory has no number
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def flush_or_discard(self) -> None:
        """Write the buffered text if possible, so that nothing remains that could fail at the end of the process."""
        try:
            self._stream.flush()
        except OSError:
            self.discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        from nntask import StorageError

        raise StorageError(f"cannot write to standard output: {error.strerror or error}", "files saved so far are complete") from error


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, with escapes for characters beyond ASCII unless standard output takes them all."""
    return json.dumps(value, ensure_ascii=not (sys.stdout.encoding or "utf-8").lower().startswith("utf"))


def complain(sentence: str) -> None:
    """Print a sentence on stderr if possible; the exit code reports the result in any case."""
    if len(sentence) > _SHORT or not sentence.isprintable():  # short sentences need no import, which a signal may have interrupted
        from nntask.io import printable

        sentence = printable(sentence)
    with contextlib.suppress(OSError):
        print(f"nntask: {sentence}", file=sys.stderr)


class Doing(logging.Handler):
    """Prints what a package logs that it is doing, once that has taken a while, and repeats it with the time if nothing else is logged.

    Args:
        package: name of the package's logger.
        after: seconds of silence at the beginning.
        show: function that prints a sentence.
        every: seconds after which the latest message is repeated.
    """

    def __init__(self, package: str, after: float, show: Callable[[str], None] = complain, every: float = 15.0) -> None:
        super().__init__(logging.INFO)
        self._logger, self._show, self._latest, self._is_late = logging.getLogger(package), show, "", False
        self._after, self._every, self._begin, self._is_over = after, every, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="nntask progress", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message, and print it if the silence is over. The lock of the handler is held."""
        self._latest, self._begin = record.getMessage(), time.monotonic()
        if self._is_late:
            self._show(self._latest)

    def _repeat(self) -> None:
        seconds = self._after
        while not self._is_over.wait(seconds):
            with self.lock or contextlib.nullcontext():
                age = time.monotonic() - self._begin
                if self._is_late and age < self._every:  # a later message has been shown meanwhile
                    seconds = self._every - age
                    continue
                if self._latest:
                    self._show(f"{self._latest} ({age:.0f} s so far)" if self._is_late else self._latest)
                self._is_late, seconds = True, self._every

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
