"""A service of a confined process that tries to leave it, as a program would that has got past Jinja's sandbox."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

IMPORTED: Final = ("support.nowhere",)
_PLACE: Final = Path("/tmp/nntask-escaped")


class Escaping:
    """Answers a request, the name of an attempt, with what came of it."""

    facts = "ready"

    def __init__(self, content: Any) -> None:
        self._attempts: dict[str, Callable[[], Any]] = {
            "read the server's environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
            "read a file": lambda: Path("/etc/hostname").read_text(),
            "write a file": lambda: _PLACE.write_text("x"),
            "open a socket": socket.socket,
            "free a descriptor": _with_a_free_descriptor,
            "own environment": lambda: [name for name in os.environ if "KEY" in name],
            "exit": lambda: os._exit(3),
            "say much": lambda: "a" * 1_000_000,
        }

    def __call__(self, content: str) -> Any:
        """Return what an attempt gives, or the name of its error."""
        try:
            return str(self._attempts[content]())
        except OSError as error:
            return type(error).__name__ + (f" {error.errno}" if error.errno else "")


def _with_a_free_descriptor() -> bytes:
    os.close(2)
    return Path("/etc/hostname").read_bytes()


SERVICE: Final = Escaping
