"""The location of every block: the scheduler's core over host memory of which only bytes are counted, with the disk tier below.

The core (`scheduler.core.machine`) decides on admission, eviction and fetches; this module carries out its actions. A task of a graph is to the core
like an acquisition of the program: it occupies no worker and starts as soon as its data is in place. So the core schedules memory, and `run`
schedules threads.

Rules. There is one lock; the thread that brings an event carries out the resulting actions. Finalizers only append to an inbox that the next event
drains. Small results are counted in lumps that are never evicted.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from nntask.hardware import give_back_freed
from scheduler import SCRATCH, DoesNotFit, Mode, R, RuntimeBroken, SchedulerError, Shortage
from scheduler.drivers import THREADS
from scheduler.machine import (
    POLICIES,
    RAM,
    CopyFailed,
    CopyFinished,
    CopyTile,
    Event,
    ForgetObject,
    HandleAdopted,
    HandleChanged,
    HandleId,
    HandleRecord,
    HandleReleased,
    Machine,
    MemoryNode,
    Models,
    NodeId,
    ReportFailure,
    RunTask,
    Task,
    TaskFinished,
    TaskId,
    TaskSubmitted,
    carry_out,
    rounded,
)
from scheduler.storage import DiskTier

from .spill import SpillEngine, staging_bytes
from .values import MemoryBlock

TRIM: Final = 8
"""After traffic of this fraction of the budget, memory that the allocator keeps is given back to the system."""

LUMP: Final = 64
"""Size of a lump of small results, as a fraction of the budget."""

DISK: Final = NodeId(1)
FAR: Final = 1 << 50
"""Next use of a block that no task will read."""


class Client(Protocol):
    """A source of tasks, called with the store's lock held.

    Attributes:
        first: order of its first task.
    """

    first: int

    @property
    def is_nested(self) -> bool:
        """Whether a task of another client waits for this client."""

    @property
    def is_open(self) -> bool:
        """Whether a caller still waits for this client."""

    @property
    def num_busy(self) -> int:
        """Number of threads that run a task or could take one."""

    def admitted(self, number: int, task: Task) -> None:
        """Take a task whose data is in place."""

    def refused(self, number: int, error: BaseException) -> None:
        """Note that a task will never run."""

    def broken(self, error: BaseException) -> None:
        """End, because the store can run no more tasks."""


class Token(NamedTuple):
    """The client of a task, and the client's number for the task."""

    client: Client
    number: int


def _token_of(task: Task) -> Token:
    """Return the client and number of a task."""
    assert isinstance(task.token, Token)  # `Store.submit` has set it
    return task.token


class Store:
    """Results of graphs within a budget.

    Args:
        ram: bytes of host memory.
        disk: the tier file and its capacity in bytes; None without a disk.

    Attributes:
        lock: guards all state of the store.
        num_handed_over: number of blocks that the program holds.
        largest: bytes of the largest result so far.
        peak: most bytes counted at once.
    """

    def __init__(self, ram: int, disk: tuple[DiskTier, int] | None) -> None:
        self.lock = threading.Lock()
        staging = 0 if disk is None else staging_bytes(ram)
        nodes = [MemoryNode("ram", ram - staging * THREADS, is_counted=True)]
        if disk is not None:
            nodes.append(MemoryNode("disk", disk[1], is_storage=True, is_counted=True))
        self.ram = nodes[0]
        self.machine = Machine(nodes, POLICIES["prio"](Models()))
        self.clients: set[Client] = set()
        self.threads: set[int] = set()  # identifiers of the threads that run tasks
        self.inbox: deque[HandleRecord] = deque()
        self.blocks: dict[int, MemoryBlock] = {}  # by the identity of their owner
        self.small_bytes = 0
        self.num_handed_over = 0
        self.largest = 0
        self.peak = 0
        self.failure: BaseException | None = None
        self._lump = max(rounded(ram // LUMP), 1 << 16)
        self._lumps: list[HandleRecord] = []
        self._numbers = 0
        self._untrimmed = 0
        self._disk: SpillEngine | None = None
        if disk is not None:
            self._disk = SpillEngine(disk[0], disk[1], DISK, staging, self._copied, self._not_copied, self.fail, self._keep)
            self._disk.start()

    @property
    def is_full(self) -> bool:
        """Whether more bytes are counted than the budget."""
        return self.ram.used > self.ram.budget

    @property
    def spills(self) -> bool:
        """Whether there is a disk below."""
        return self._disk is not None

    def record(self, name: str, nbytes: int, view: object = None) -> HandleRecord:
        """Return a new handle record."""
        self._numbers += 1
        return HandleRecord(HandleId(self._numbers), nbytes, rounded(nbytes), view, name, "temporary", "data")

    def submit(
        self, client: Client, number: int, name: str, order: int, blocks: Sequence[MemoryBlock], scratch_nbytes: int, next_uses: Sequence[int]
    ) -> None:
        """Request the data of a task: its blocks, and scratch memory for its result. The client is called when they are in place, perhaps at once.

        Args:
            client: the client.
            number: the client's number for the task.
            name: kind of the task, for messages.
            order: order of the task among the tasks of all clients.
            blocks: blocks that the task reads.
            scratch_nbytes: bytes of scratch memory; 0 for a task without a result.
            next_uses: for each block, the order of the task that reads it next after this one.
        """
        accesses: list[tuple[HandleRecord, Mode]] = [(block.record, R) for block in blocks if block.record is not None]
        uses = list(next_uses)
        if scratch_nbytes:
            scratch = self.record(f"room for {name}", scratch_nbytes)
            scratch.released = True
            accesses.append((scratch, SCRATCH))
            uses.append(FAR)
        self._numbers += 1
        task = Task(TaskId(self._numbers), None, name, ("host",), tuple(accesses), {}, order=order, next_uses=uses, token=Token(client, number))
        self.bring(TaskSubmitted(task))

    def finish(self, task: Task) -> None:
        """Note the end of a task."""
        self.bring(TaskFinished(task))
        task.token = None  # the machine keeps its latest events, and so the task

    def find(self, owner: Any, nbytes: int, is_array: bool) -> MemoryBlock:
        """Return the block of an owner; a new block if the owner has none."""
        block = self.blocks.get(id(owner))
        if block is None:
            block = self.blocks[id(owner)] = MemoryBlock(owner, nbytes, is_array=is_array)
        return block

    def adopt(self, block: MemoryBlock, name: str, next_use: int) -> None:
        """Count a new block.

        Raises:
            DoesNotFit: the disk is too small for it.
        """
        block.record = self.record(name, block.nbytes, block)
        self.largest = max(self.largest, block.nbytes)
        self.bring(HandleAdopted(block.record, next_use))

    def note_changed(self, block: MemoryBlock) -> None:
        """Note that a task may have changed a block that it reads."""
        assert block.record is not None  # it is counted
        self.bring(HandleChanged(block.record))

    def release(self, block: MemoryBlock) -> None:
        """Release a block after its last reader."""
        if block.owner is not None:
            self.blocks.pop(id(block.owner), None)
        record, block.record = block.record, None
        if record is not None:
            self.bring(HandleReleased(record))

    def count_small(self, nbytes: int) -> None:
        """Count `nbytes` more bytes of small results, or fewer if negative."""
        self.small_bytes += nbytes
        while self.small_bytes > len(self._lumps) * self._lump:
            self._lumps.append(self.record("small results", self._lump))
            self.bring(HandleAdopted(self._lumps[-1], FAR, stays=True))
        while self.small_bytes < (len(self._lumps) - 2) * self._lump:
            self.bring(HandleReleased(self._lumps.pop()))

    def hand_over(self, block: MemoryBlock) -> None:
        """Give a block to the program: it stays in host memory, and counts, until no reference to it is left."""
        owner = block.owner
        self.release(block)
        held = self.record("lent to the program", block.nbytes)
        try:
            weakref.finalize(owner, self.inbox.append, held).atexit = False
        except TypeError:  # has no weak references, so its end would go unnoticed
            return
        self.num_handed_over += 1
        self.bring(HandleAdopted(held, FAR, stays=True))

    def bring(self, event: Event) -> None:
        """Advance the core by an event and carry out the resulting actions; the caller holds the lock.

        Raises:
            DoesNotFit: an adopted block fits no memory.
            SchedulerError: the core is broken.
        """
        if self.failure is not None:
            raise self.failure
        while self.inbox:
            self.num_handed_over -= 1
            self._bring(HandleReleased(self.inbox.popleft()))
        self._bring(event)

    def _bring(self, event: Event) -> None:
        try:
            actions = self.machine.handle(event)
        except DoesNotFit:
            raise  # nothing has changed
        except BaseException as error:  # a bug of ours, or an interrupt in the middle of an event
            self._break(error)
            raise
        self.peak = max(self.peak, self.ram.used)
        for action in actions:
            carry_out(action, self)

    def run_task(self, action: RunTask) -> None:
        """Call the client of a task whose data is in place."""
        client, number = _token_of(action.task)
        client.admitted(number, action.task)

    def copy_tile(self, action: CopyTile) -> None:
        """Post a copy to the threads of the disk."""
        assert self._disk is not None  # else there is one node only
        self._disk.put(action)

    def report_failure(self, action: ReportFailure) -> None:
        """Call the client of a task that will never run."""
        client, number = _token_of(action.task)
        client.refused(number, action.error)

    def _impossible(self, action: object) -> None:
        """Raise `AssertionError` for an action that the machine of graphs never takes: its nodes only count bytes, and its tasks are not recorded."""
        raise AssertionError(f"{action} for a graph")

    move_tile = discard_extent = report_step_done = _impossible

    def too_large(self, key: object, nbytes: int) -> DoesNotFit:
        """Return the error for a task that reads `nbytes` bytes at once, in the terms of graphs."""
        taken = self.machine.memory.held_bytes
        held = f", of which {taken:,} B are lent to the program or small results" if taken else ""
        full = not self.spills and nbytes <= self.ram.budget
        below = "; without a disk earlier results stay there" if full else ""
        advice = "raise ram, " + ("name a disk, " if full else "") + ("let go of earlier results, " if taken else "") + "or use smaller chunks"
        return DoesNotFit(
            Shortage("taken" if full else "task", self.ram.name, nbytes, self.ram.budget, taken, task=str(key)),
            f"there is no room for task {key!r}, which reads {nbytes:,} B of results at once, in {self.ram.budget:,} B of ram{held}{below}",
            advice,
        )

    def look_for_deadlock(self) -> None:
        """End the latest nested run if tasks wait for the graphs that they compute, these graphs wait for memory, and no other task runs and no
        copy is under way. The inputs of the waiting tasks stay in memory until these tasks end. The core cannot detect this, because to it they
        are running."""
        nested = [client for client in self.clients if client.is_nested and client.is_open]
        if not nested or self.failure is not None or self.machine.memory.num_copying:
            return
        if sum(client.num_busy for client in self.clients) <= len(nested):
            latest = max(nested, key=lambda client: client.first)
            latest.broken(
                DoesNotFit(
                    Shortage("taken", self.ram.name, 0, self.ram.budget, self.ram.used),
                    f"{len(nested)} graphs that are computed within tasks wait for memory that those tasks hold: of {self.ram.budget:,} B of ram "
                    f"{self.ram.used:,} B are taken",
                    "raise ram, use fewer workers, or compute nothing within tasks",
                )
            )

    def forget_object(self, action: ForgetObject) -> None:
        """Drop a block's memory, or its extent in the file."""
        block = action.handle.view
        if not isinstance(block, MemoryBlock):
            return
        if action.node != RAM:
            assert self._disk is not None
            self._disk.discard(block.extent)
            block.extent = None
        elif block.owner is not None:
            self.blocks.pop(id(block.owner), None)
            block.forget()

    def _copied(self, action: CopyTile, start_ns: int, end_ns: int) -> None:
        with self.lock:
            if self.failure is None:
                block: MemoryBlock = action.source.handle.view  # type: ignore[assignment]
                if action.target.node == RAM:
                    self.blocks[id(block.owner)] = block
                self.bring(CopyFinished(action.source, action.target))
                self.look_for_deadlock()
                self._untrimmed += action.source.handle.nbytes
        if self._untrimmed > self.ram.budget // TRIM:
            self._untrimmed = 0
            give_back_freed()

    def _not_copied(self, action: CopyTile, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.bring(CopyFailed(action.source, action.target, error))
                self.look_for_deadlock()

    def _keep(self, block: MemoryBlock) -> None:
        """Count a block that cannot be pickled as resident for its whole life."""
        with self.lock:
            kept = self.record("cannot be pickled", block.nbytes)
            weakref.finalize(block, self.inbox.append, kept).atexit = False
            self.num_handed_over += 1
            self.bring(HandleAdopted(kept, FAR, stays=True))

    def fail(self, error: BaseException) -> None:
        """Break the store with the error of a thread that died, so that all waiting clients receive it."""
        with self.lock:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """End all clients; no task runs any more."""
        if not isinstance(error, SchedulerError):
            broken = RuntimeBroken(f"{type(error).__name__}: {error}", subject="the memory of Dask graphs")
            broken.__cause__ = error
            error = broken
        self.failure = self.failure or error
        for client in list(self.clients):
            client.broken(self.failure)

    def close(self) -> None:
        """Free all blocks and close the file. Values that the program holds stay valid."""
        with self.lock:
            self.failure = self.failure or SchedulerError("this runtime of Dask graphs is closed; make a new one")
            for client in list(self.clients):
                client.broken(self.failure)
        if self._disk is not None:
            self._disk.stop()
            with suppress(RuntimeError):
                self._disk.join()
        self.blocks.clear()
