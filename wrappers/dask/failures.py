"""What went wrong on a node, as its client is told."""

from __future__ import annotations

from typing import TypeVar

from nntask.errors import NntaskError

from .exchange import PeerLost

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
            return cause
    if isinstance(error, NntaskError):
        return type(error)(str(error))
    return NodeFailed("; because ".join(f"{type(cause).__name__}: {cause}" for cause in _chain(error)))


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__
    return found


class NodeFailed(Exception):
    """Something failed on a node that is no loss of a peer and no mistake of the user's."""
