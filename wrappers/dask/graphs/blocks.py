"""Plain records of the ledger: blocks of memory, requests of tasks, and the actions that the ledger asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

FAR: Final = 1 << 50
"""Next use of a block that no task will read."""

State = Literal["memory", "writing", "spoilt", "both", "disk", "reading", "lost"]
Step = Literal["write", "read", "copied", "failed", "changed", "dropped"]

TRANSITIONS: Final[dict[tuple[State, Step], State]] = {
    ("memory", "write"): "writing",
    ("writing", "copied"): "both",
    ("writing", "failed"): "memory",
    ("writing", "changed"): "spoilt",
    ("spoilt", "copied"): "memory",
    ("spoilt", "failed"): "memory",
    ("spoilt", "changed"): "spoilt",
    ("memory", "changed"): "memory",
    ("both", "changed"): "memory",
    ("both", "dropped"): "disk",
    ("disk", "read"): "reading",
    ("reading", "copied"): "both",
    ("reading", "failed"): "lost",
}
"""(state, step) -> next state of a block. A block is *spoilt* if a task has changed it while it was being written, so that the copy is useless."""

COPYING: Final = frozenset({"writing", "spoilt", "reading"})


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """The memory of results: bytes that are in memory, on the disk, or both.

    Attributes:
        nbytes: exact bytes of the memory; `size` is the number counted.
        owner: the object that owns the memory, None while the block is not in memory; `is_array` says whether it is an array.
        client: the run whose results lie in the block.
        extent: extent in the file, None without one.
        holders: results that lie in the block.
        uses: numbers of the tasks that will read the block, a heap.
        next_use: order of the next task that will read it; changes only before the block is counted, or while a request holds it.
        number: number of the block, which breaks ties.
        is_counted: whether the block counts: from `Ledger.adopt` to `Ledger.release`.
        state: place of the bytes, see `TRANSITIONS`.
        stays: whether it cannot be written.
        num_pins: number of admitted requests that read it.
        waiting: those of them that wait until it has been read.
        error: reason why it is lost.
    """

    nbytes: int
    size: int
    owner: Any = None
    client: Any = None
    is_array: bool = False
    extent: Any = None
    holders: list[Any] = field(default_factory=list)
    uses: list[int] = field(default_factory=list)
    next_use: int = FAR
    number: int = 0
    is_counted: bool = False
    state: State = "memory"
    stays: bool = False
    num_pins: int = 0
    waiting: list[MemoryRequest] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class MemoryRequest:
    """A task that asks for its blocks, and for memory for its result.

    Attributes:
        client, number: the run of the task, and its number there.
        order: position among all tasks; lower ones go first.
        blocks: blocks that it reads, each once.
        result_nbytes: expected bytes of its result.
        min_nbytes: value of `result_nbytes` with which it runs if nothing else can free more.
        depth: number of graphs around the task's graph; deeper ones go first.
        is_admitted: whether it holds its blocks and the memory for its result.
        num_arriving: number of its blocks that are being read.
    """

    client: Any
    number: int
    order: int
    blocks: Sequence[MemoryBlock]
    result_nbytes: int
    min_nbytes: int
    depth: int = 0
    is_admitted: bool = False
    num_arriving: int = 0


class StartTask(NamedTuple):
    """Run a task: its blocks are in memory."""

    request: MemoryRequest


class RefuseTask(NamedTuple):
    """Give up a task: a block is lost, the disk has failed, or, without an error, it does not fit."""

    request: MemoryRequest
    error: BaseException | None


class MoveBlock(NamedTuple):
    """Write a block to the disk or read it back, followed by `end_copy`, `fail_copy` or `stay`; or drop its memory, or its extent on the disk."""

    kind: Literal["write", "read", "forget", "discard"]
    block: MemoryBlock


Action = StartTask | RefuseTask | MoveBlock
