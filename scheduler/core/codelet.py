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
    """Cost of a task: floating-point operations, and bytes read plus written."""

    flops: float
    nbytes: float


Begin = Callable[..., None]
"""Starts an asynchronous operation: ``begin(done, *views, **constants)``. It is called under the runtime's lock, so it must return at once and must
not call the runtime. ``done(None)`` or ``done(error)`` must be called later, exactly once, from any thread. Until then the views are its own."""

Many = Callable[[Sequence[tuple[Sequence[Any], Mapping[str, Any]]]], None]
"""Starts several tasks at once. The argument has the views and the constants of each task."""

CostFunction = Callable[[Sequence[Any], Mapping[str, Any]], Cost]
"""Returns the `Cost` of a task, given the ``view`` objects of its handles and its constants."""


class Tail(NamedTuple):
    """The last part of a computation, which computes some of the results from the others, with bit-identical values.

    Attributes:
        codelet: codelet that computes this part alone.
        reads, writes: indices of the whole task's accesses that the tail reads and writes, in the order of the tail's own accesses. It may read
            results of the task.
        constants: names of the task's constants that the tail takes.
    """

    codelet: Codelet
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    constants: tuple[str, ...]


class Link(NamedTuple):
    """A result of one task of a chain that a later one reads. Accesses are counted from the end if their index is negative.

    Attributes:
        writer, result: number of the task in the chain that writes the data, and the index of its access.
        reader, argument: number of the task that reads the data, and the index of its access.
        is_private: whether no other task may use the data, so that it need not be written.
    """

    writer: int
    result: int
    reader: int
    argument: int
    is_private: bool = False


class KernelChain(NamedTuple):
    """Tasks of several codelets that one kernel of a CUDA worker can compute, because later ones read results of earlier ones.

    Attributes:
        kernels: `Codelet.cuda` of each task, in order.
        links: results that tasks read; at least one for each task but the first.
        run: kernel for all of them. Results are bit-identical to one task after another, but private ones may be left unwritten.
    """

    kernels: tuple[Kernel, ...]
    links: tuple[Link, ...]
    run: Many


@dataclass(slots=True, eq=False)
class Codelet:
    """A named computation.

    Args:
        name: unique name, shown in traces and errors.
        cpu: kernel for CPU workers and for simulated devices, which compute on the CPU.
        cuda: kernel for CUDA workers.
        host: asynchronous operation over data in host memory, such as waiting for data from elsewhere; see `Begin`. It occupies no worker, and any
            number of such tasks may be in progress at a time; those of recorded steps begin in their order.
        cost: function from the ``view`` objects of the task's handles (which know shapes) and the task's constants to the task's `Cost`.
        tail: last part of the computation, if some of its results follow from the others.
        cuda_many: kernel for several tasks on a CUDA worker, of which none writes data that another one uses. Results are bit-identical to calls of
            `cuda` one after another.
        chains: chains that begin with this codelet; of those that fit, the first one is used.
        again: fraction of its work that recomputes results of another task of the step, if the program has arranged the recomputation by itself.
        cpu_only: whether only CPU workers run it, over data in host memory, although simulated devices could.
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
    chains: Sequence[KernelChain] = ()

    @property
    def kinds(self) -> tuple[WorkerKind, ...]:
        """Kinds of workers that have an implementation of this codelet."""
        if self.host is not None:
            return ("host",)
        if self.cpu_only:
            return ("cpu",)
        kinds: tuple[WorkerKind, ...] = ("cpu", "sim") if self.cpu is not None else ()
        return (*kinds, "cuda") if self.cuda is not None else kinds

    def __repr__(self) -> str:
        return f"Codelet({self.name!r})"
