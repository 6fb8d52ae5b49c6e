"""Standard output of the command: closed, full, of an encoding that lacks characters, or with a reader that has ended.

What a command prints goes through `Output`, so that a failed write of it is told from a failed write of a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final, TextIO

_SHORT: Final = 1000


def open_missing() -> None:
    """Open the null device in place of each standard stream that was closed when the process began, lowest first: no other file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives


class Output:
    """A stream as `sys.stdout`; its failures are errors of the command, but for the pipe whose reader has ended.

    Raises:
        StorageError: `write` or `flush` failed.
        BrokenPipeError: of `write` or `flush`: nobody reads any more.
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
        """Write what is buffered."""
        with _failures():
            self._stream.flush()

    def discard(self) -> None:
        """Let what is buffered, and whatever follows, go nowhere."""
        with contextlib.suppress(OSError, ValueError):  # a stream in memory has no number
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def flush_or_discard(self) -> None:
        """Write what is buffered if that is possible, so that the end of the process has nothing left that can fail."""
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

        raise StorageError(f"cannot write to standard output: {error.strerror or error}; files saved so far are complete") from error


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, with escapes for characters beyond ASCII unless standard output takes them all."""
    return json.dumps(value, ensure_ascii=not (sys.stdout.encoding or "utf-8").lower().startswith("utf"))


def complain(sentence: str) -> None:
    """Print a sentence on stderr, if that can be written; the exit code says what happened in any case."""
    if len(sentence) > _SHORT or not sentence.isprintable():  # else nothing is imported, which a signal may have interrupted
        from nntask.io import printable

        sentence = printable(sentence)
    with contextlib.suppress(OSError):
        print(f"nntask: {sentence}", file=sys.stderr)
