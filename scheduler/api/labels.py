"""Labels of the tasks that a program submits: phase, minibatch, module and block; and numbered contributions to sums.

Labels are declared by the code that knows them: modules know their paths, a backward pass ends a minibatch, an optimizer updates. A recorded step
keeps the label of each task for planners. All of them are context variables, so nothing is passed through the calls of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ..core.step_plan import Label, Phase

_contribution: Final[ContextVar[int | None]] = ContextVar("nntask_contribution", default=None)
_scope: Final[ContextVar[tuple[Phase, str, int | None]]] = ContextVar("nntask_scope", default=("forward", "", None))
_minibatch: Final[ContextVar[int]] = ContextVar("nntask_minibatch", default=0)


def current_label() -> Label:
    """Return the label of a task that is submitted now."""
    phase, path, block = _scope.get()
    return Label(phase, _minibatch.get(), path, block)


@contextmanager
def labelled(*, phase: Phase | None = None, path: str | None = None, block: int | None = None) -> Iterator[None]:
    """Label the tasks submitted in the ``with`` block; None leaves a field as it is.

    Args:
        phase: phase of a training step; "forward" outside all such blocks.
        path: dotted path of the module that the tasks belong to.
        block: number of the block of a model (`TaskRuntime.block`).
    """
    old_phase, old_path, old_block = _scope.get()
    token = _scope.set((phase or old_phase, old_path if path is None else path, old_block if block is None else block))
    try:
        yield
    finally:
        _scope.reset(token)


def next_minibatch() -> None:
    """End a minibatch: tasks submitted from now on, in this context, belong to the next one.

    Each backward pass of nntask calls this at its end, and so does a program that records a step by itself. Without it a step has one minibatch.
    """
    _minibatch.set(_minibatch.get() + 1)


@contextmanager
def contribution(number: int | None) -> Iterator[None]:
    """Assign REDUX accesses of the tasks submitted in the block to contribution `number` of each sum, and so to lane `number` mod L.

    Earlier submissions do not matter, so sums of numbered contributions are bit-identical wherever each contribution is computed. None returns to
    counted contributions.
    """
    token = _contribution.set(number)
    try:
        yield
    finally:
        _contribution.reset(token)


def current_contribution() -> int | None:
    """Return the number that `contribution` gives tasks that are submitted now; None for counted contributions."""
    return _contribution.get()


def kept_here(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `function` under the present contribution and label. Other context variables are not kept alive."""
    number, minibatch, scope = _contribution.get(), _minibatch.get(), _scope.get()

    def run() -> None:
        before, token = _minibatch.set(minibatch), _scope.set(scope)
        try:
            with contribution(number):
                function()
        finally:
            _scope.reset(token)
            _minibatch.reset(before)

    return run
