"""Snapshots of the Python state that a capture could read: the module's tree, the loss, and the objects that their code reaches.

A step is captured once and replayed, so everything that the capture read must be unchanged. `World.now` walks all that is reachable from the module
and the loss: attributes, containers, hooks, closures, globals that the program's own functions load, class attributes, generators, iterators. Leaves
are compared by value if Python can compare them, else by identity. A walk takes milliseconds; its result is reused while an identity check finds no
change.

Values of tensors are not part of a snapshot: the session holds those of the module, and those of other objects are compared when a step begins
(`write_step` of `python_state`).
Not seen: state in C code, globals of installed packages other than plain values and containers of such, and the clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nntask import UsageError

from .snapshots import Slot, Snapshot
from .walk import Walk

MOST_DEPTH: Final = 20_000
"""Recursion limit during a walk; an object within an object takes two to four frames."""


class World:
    """The objects that are reachable from a module and a loss.

    Args:
        roots: name -> module or function.
        own: id -> name of the module's tensors that the session holds.
    """

    def __init__(self, roots: Mapping[str, Any], own: Mapping[int, str]) -> None:
        self._roots, self._own = roots, own
        self._last: Snapshot | None = None
        self._is_certain = False

    def now(self) -> Snapshot:
        """Return the current state; the last snapshot if nothing has been replaced since."""
        if self._last is None or not (self._is_certain or self._last.is_current()):
            self._last = self.walked()
        return self._last

    @contextmanager
    def looked_at_once(self) -> Iterator[None]:
        """Take one snapshot for the block, in which no code of the program runs except as reported by `note_run`."""
        self.now()
        self._is_certain = True
        try:
            yield
        finally:
            self._is_certain = False

    def note_run(self) -> None:
        """Note that code of the program has run, so that the state may have changed."""
        self._is_certain = False

    def walked(self) -> Snapshot:
        """Return a new snapshot of all objects that the module and the loss reach.

        Raises:
            UsageError: objects are nested too deeply to be walked before each step.
        """
        walk = Walk(self._own)
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
            limit = sys.getrecursionlimit()
            sys.setrecursionlimit(max(limit, MOST_DEPTH))
            try:
                for name, root in self._roots.items():
                    walk.visit(name, root, Slot(None, None, root))
                walk.visit_options()
            except RecursionError:
                raise UsageError(
                    f"the module or the loss holds objects nested too deeply to look at before a step, last at {walk.last_path}",
                    "keep such a structure outside of them, or in a list",
                ) from None
            finally:
                sys.setrecursionlimit(limit)
        return walk.found
