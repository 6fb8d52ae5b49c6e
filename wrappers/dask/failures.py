"""What went wrong on a node, as its client is told."""

from __future__ import annotations

from nntask.errors import NntaskError

from .exchange import PeerLost


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
