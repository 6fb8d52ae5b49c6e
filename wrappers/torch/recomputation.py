"""What a module's own checkpointing makes again: PyTorch enters a context while a backward pass repeats a part of the forward pass, and what is
captured inside is marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_MAKES_AGAIN: Final = ContextVar("makes_again", default=False)


def makes_again() -> bool:
    """Whether the calling thread is inside `making_again`."""
    return _MAKES_AGAIN.get()


@contextmanager
def making_again() -> Iterator[None]:
    """The block makes values again; for `torch.utils.checkpoint.checkpoint(context_fn=)`, which leaves it early as soon as it has all it wants."""
    token = _MAKES_AGAIN.set(True)
    try:
        yield
    finally:
        _MAKES_AGAIN.reset(token)
