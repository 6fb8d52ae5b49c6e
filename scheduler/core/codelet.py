"""A codelet: one kind of computation, with an implementation per kind of worker.

The scheduler calls ``codelet.cpu(*views, **constants)``: one view per access of the task in the order of submission, then the task's
constants by keyword. It never looks inside a view. A codelet without an implementation for a worker kind never runs on such a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .records import WorkerKind

Kernel = Callable[..., None]


class Cost(NamedTuple):
    """What a task costs: floating-point operations, and bytes read plus written."""

    flops: float
    nbytes: float


Begin = Callable[..., None]
"""Begins what ends by itself, ``begin(done, *views, **constants)``, and only takes note: it is called under the runtime's lock and may not call back.
Later, once, from any thread, ``done(None)`` or ``done(error)`` must be called. The views are its own until then."""

Many = Callable[[Sequence[tuple[Sequence[Any], Mapping[str, Any]]]], None]
"""Starts several tasks of one codelet at once, from the views and the constants of each."""

CostFunction = Callable[[Sequence[Any], Mapping[str, Any]], Cost]


class Tail(NamedTuple):
    """The end of a computation, which makes some of its results from the others, bit by bit the same.

    Attributes:
        codelet: what it is by itself.
        reads, writes: the accesses of the whole task that it reads and writes, in the order of its own; those that it reads may be results.
        constants: names of the task's constants that it takes.
    """

    codelet: Codelet
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    constants: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Codelet:
    """A named computation.

    Args:
        name: unique, as it appears in traces and errors.
        cpu: runs on a CPU worker and, because simulated devices compute on the CPU, on simulated ones.
        cuda: runs on a CUDA worker.
        host: begins something that occupies no worker while it is under way, such as waiting for data from elsewhere; see `Begin`. Any number of
            such tasks are under way at a time, over data in host memory.
        cost: from the ``view`` objects of the task's handles (they know shapes) and its constants to the task's `Cost`.
        tail: the end of the computation, where a part of its results follows from the rest.
        cuda_many: runs several tasks on a CUDA worker, bit by bit as `cuda` would one after another, where none writes what another one uses.
        again: share of its work that makes again what another task of the step has made, for a program that has arranged that by itself.
        cpu_only: whether CPU workers alone run it, over data in host memory, although simulated devices could.
    """

    name: str
    cpu: Kernel | None = None
    cuda: Kernel | None = None
    host: Begin | None = None
    cost: CostFunction | None = None
    tail: Tail | None = None
    cuda_many: Many | None = None
    cpu_only: bool = False
    again: float = 0.0

    @property
    def kinds(self) -> tuple[WorkerKind, ...]:
        """Workers that it has an implementation for."""
        if self.host is not None:
            return ("host",)
        if self.cpu_only:
            return ("cpu",)
        kinds: tuple[WorkerKind, ...] = ("cpu", "sim") if self.cpu is not None else ()
        return (*kinds, "cuda") if self.cuda is not None else kinds

    def __repr__(self) -> str:
        return f"Codelet({self.name!r})"
