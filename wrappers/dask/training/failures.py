"""Errors on a node, in the form in which the client receives them."""

from __future__ import annotations

from copy import copy
from typing import TypeVar

from nntask import NntaskError
from nntask.io import of_system_limit

from .peers import PeerLost

E = TypeVar("E", bound=Exception)


def blaming(error: E, worker: str) -> E:
    """Attach the address of the worker whose node met an error; the address travels with the error."""
    vars(error)["worker"] = worker
    return error


def blamed(error: BaseException | None) -> str:
    """Return the worker whose node met an error; "" if the client met it."""
    return str(vars(error).get("worker", "")) if error is not None else ""


def portable(error: BaseException) -> Exception:
    """Return an error in a form that can be sent.

    An error of this project keeps its type, sentence and fields; any other becomes `NodeFailed` with the chain of causes.
    """
    for cause in _chain(error):
        if isinstance(cause, PeerLost):
            return copy(cause)  # the connection keeps the original, which must not get the frames of this node
    if (limit := of_system_limit(error)) is not None:
        return limit
    if isinstance(error, NntaskError):
        return copy(error)  # with its fields, without its frames
    return NodeFailed("; because ".join(f"{type(cause).__name__}: {cause}" for cause in _chain(error)))


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes, and with them the objects of their frames.

    The node is among these objects, and the node's state may refer to its errors: a reference cycle that only the garbage collector would find.
    The node of a client that is gone must end at once."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = None
            waiting += [current.__cause__, current.__context__]


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__
    return found


class NodeFailed(Exception):
    """An error on a node that is neither the loss of a peer nor a mistake of the user."""
