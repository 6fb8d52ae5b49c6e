"""What went wrong on a node, as its client is told."""

from __future__ import annotations

from copy import copy
from typing import TypeVar

from nntask.errors import NntaskError

from .peers import PeerLost

E = TypeVar("E", bound=Exception)


def blaming(error: E, worker: str) -> E:
    """An error with the worker, by address, whose node met it; both travel together."""
    vars(error)["worker"] = worker
    return error


def blamed(error: BaseException | None) -> str:
    """The worker whose node met an error; "" if the client did."""
    return str(vars(error).get("worker", "")) if error is not None else ""


def portable(error: BaseException) -> Exception:
    """An error as it can travel: its own type where that is one of ours that is made of a sentence, with what caused it as a chain of sentences."""
    for cause in _chain(error):
        if isinstance(cause, PeerLost):
            return copy(cause)  # the connection keeps the other one, and raising that would hang this node's frames on it
    if isinstance(error, NntaskError):
        return type(error)(str(error))
    return NodeFailed("; because ".join(f"{type(cause).__name__}: {cause}" for cause in _chain(error)))


def forget_frames(error: BaseException) -> None:
    """Let go of what the frames hold that an error, or what it came of, has passed through.

    The node is there, and what a node keeps may name its errors: a circle that only the garbage collector would find, some day. A node whose client
    is gone should end at once.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        at = waiting.pop()
        if at is not None and id(at) not in seen:
            seen.add(id(at))
            at.__traceback__ = None
            waiting += [at.__cause__, at.__context__]


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__
    return found


class NodeFailed(Exception):
    """Something failed on a node that is no loss of a peer and no mistake of the user's."""
