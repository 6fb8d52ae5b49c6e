"""Shortages of memory: the facts of each `DoesNotFit` as fields, and the one module that puts them into words.

A `Shortage` speaks of memory nodes, bytes and tasks. Programs that know how their users set budgets, such as by flags, choose their own advice by its
fields; nothing reads its sentences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .records import SCRATCH, HandleRecord, Mode

Cause = Literal["task", "taken", "full", "readers", "step", "idle", "reserve", "outside"]
"""Kind of a shortage.

- task: the working set of a task exceeds the largest memory that may run it.
- taken: a task would fit an empty node, but bytes are taken by data that has nowhere else to go.
- full: the last tier has too few free bytes for new data.
- readers: host memory has too few free bytes for reading a file.
- step: a step as a whole needs more bytes of a node than its budget.
- idle: the smallest task with flops exceeds a device, which could only copy.
- reserve: more bytes were requested for a budget than are available; `budget` is the number of bytes available.
- outside: a library allocates outside the budget of a device, whose memory is exhausted; `budget` is that of the device, 0 if unknown.
"""


class AccessSize(NamedTuple):
    """Data that counts towards a shortage.

    Attributes:
        mode: mode of the access; "" without an access.
        name: name of the data.
        nbytes: size of the data.
    """

    mode: str
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """A memory that is too small.

    Attributes:
        cause: kind of the shortage.
        node: name of the memory that is too small.
        needed: bytes that are needed at once.
        budget: bytes of the node's budget.
        taken: bytes of the budget that were taken at that moment.
        task: name of the task or library that needs the bytes; "" for none.
        sizes: data that makes up the needed bytes, if it is known.
        hole: bytes of the largest contiguous free extent.
        workers: kinds of workers that may run the task; () for any.
        pin: name of the worker on which the program placed the task; "" for none.
        reading: bytes of host memory that readers of files take from the budget.
        detail: words of another library about its failed allocation; "" for none.
    """

    cause: Cause
    node: str
    needed: int
    budget: int
    taken: int = 0
    task: str = ""
    sizes: tuple[AccessSize, ...] = ()
    hole: int = 0
    workers: tuple[str, ...] = ()
    pin: str = ""
    reading: int = 0
    detail: str = ""

    @property
    def free(self) -> int:
        """Bytes of the budget that were free."""
        return self.budget - self.taken

    @property
    def fact(self) -> str:
        """The rule and the values as a clause, without advice."""
        match self.cause:
            case "task":
                return self._of_task()
            case "taken":
                return (
                    f"{self.task} needs {self.needed:,} B at once on node {self.node}{self._sizes()}, but {self._taken()} by data that has nowhere "
                    f"else to go and the largest hole is {self.hole:,} B"
                )
            case "full":
                maker = f"{self.task} makes " if self.task else ""
                return f"node {self.node} is full: {maker}{self.needed:,} B of new data that must have room there, but {self._taken()}"
            case "readers":
                name = self.sizes[0].name
                return f"reading {name} from its source takes {self.needed:,} B of {self.node} for its readers, but {self._taken()}"
            case "step":
                return f"the step needs {self.needed:,} B of {self.node} at least, more than its budget of {self.budget:,} B"
            case "idle":
                return (
                    f"the smallest task that computes needs {self.needed:,} B, more than the {self.budget:,} B of {self.node}, which would stay idle"
                )
            case "reserve":
                many = f"budgets of {self.needed:,} B in total{self._sizes()} are" if len(self.sizes) > 1 else f"a budget of {self.needed:,} B is"
                limit = "this process may use (limit of the machine or of its cgroup)" if self.node == "ram" else f"{self.node} has free"
                return f"{many} above the {self.budget:,} B of memory that {limit}"
            case "outside":
                state = self.detail or f"{self.free:,} of {self.budget:,} bytes are free"
                return f"{self.node} has no memory left for {self.task}, which allocates outside the budget ({state})"

    @property
    def remedy(self) -> str:
        """Advice to a program that uses the runtime itself."""
        match self.cause:
            case "task" if self.pin:
                return f"raise the budget, use smaller tiles or minibatches, or submit it outside place({self.pin!r})"
            case "task" | "taken":
                return "raise the budget or use smaller tiles or minibatches"
            case "readers":
                return "raise the budget, or attach sources before data is written"
            case "reserve":
                return "lower it, and name a disk for the rest"
            case "outside":
                return "lower the budget of the device, or end other programs that use the card"
            case "full" | "step" | "idle":
                return "raise the budget"

    def _of_task(self) -> str:
        if self.pin:
            where = f"{self.node}, on which it was placed"
        else:
            kinds = f"of kind {' or '.join(self.workers)} " if self.workers else ""
            where = f"the largest memory with workers {kinds}for it"
        without = f" without the {self.reading:,} B of RAM for readers of files" if self.reading else ""
        return f"{self.task} needs {self.needed:,} B at once{self._sizes()}, more than the {self.budget:,} B of {where}{without}"

    def _sizes(self) -> str:
        if not self.sizes:
            return ""
        return f" ({', '.join(f'{size.mode} {size.name} {size.nbytes:,} B'.lstrip() for size in self.sizes)})"

    def _taken(self) -> str:
        return f"of its budget of {self.budget:,} B {self.taken:,} B are taken"


def access_sizes(accesses: Iterable[tuple[HandleRecord, Mode]]) -> tuple[AccessSize, ...]:
    """Return the data of a task's accesses."""
    return tuple(
        AccessSize(mode, handle.spec.name or ("scratch" if mode == SCRATCH else str(handle.id)), handle.spec.size) for handle, mode in accesses
    )
