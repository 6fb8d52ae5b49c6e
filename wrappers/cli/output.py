"""Standard output of the command, which may be closed, full, in a limited encoding, or a pipe without a reader.

Everything that a command prints goes through `Output`, so that a failed write of it differs from a failed write of a file.
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

        raise StorageError(f"cannot write to standard output: {error.strerror or error}; files saved so far are complete") from error


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
