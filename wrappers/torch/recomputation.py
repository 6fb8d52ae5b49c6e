"""Marking of values that a module's own checkpointing recomputes.

PyTorch enters a context while a backward pass repeats a part of the forward pass; calls captured inside it are marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_MAKES_AGAIN: Final = ContextVar("makes_again", default=False)


def makes_again() -> bool:
    """Return whether the calling thread is inside `making_again`."""
    return _MAKES_AGAIN.get()


@contextmanager
def making_again() -> Iterator[None]:
    """Mark the block as recomputation, for `torch.utils.checkpoint.checkpoint(context_fn=)`, which leaves it as soon as it has all it needs."""
    token = _MAKES_AGAIN.set(True)
    try:
        yield
    finally:
        _MAKES_AGAIN.reset(token)
