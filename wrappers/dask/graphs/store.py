"""Which blocks are where: the scheduler's core over host memory of which only bytes are counted, with the disk tier below.

The core decides what is admitted, what leaves and what is fetched (`scheduler.core.machine`); here its actions are carried out. A task of a graph
is to the core what an acquisition of the program is: it runs on no worker, as soon as its data is in place, so the core schedules memory and `run`
schedules threads.

Rules. One lock; whoever brings an event carries out what follows. Finalizers only append to an inbox that the next event drains. Small results are
counted in lumps that never leave.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from nntask.allocator import give_back_freed
from scheduler.core.errors import DoesNotFit, RuntimeBroken, SchedulerError
from scheduler.core.events import (
    CopyFailed,
    CopyFinished,
    CopyTile,
    Event,
    ForgetObject,
    HandleAdopted,
    HandleChanged,
    HandleReleased,
    ReportFailure,
    RunTask,
    TaskFinished,
    TaskSubmitted,
)
from scheduler.core.machine import Machine
from scheduler.core.memory import MemoryNode, rounded
from scheduler.core.perf import Models
from scheduler.core.policies import POLICIES
from scheduler.core.records import RAM, SCRATCH, HandleId, HandleRecord, Mode, NodeId, R, Task, TaskId
from scheduler.drivers.disk import THREADS
from scheduler.storage import DiskTier

from .spill import SpillEngine, staging_bytes
from .values import Block

TRIM: Final = 8
"""What the allocator keeps of freed memory is given back whenever this fraction of the budget was moved."""

LUMP: Final = 64
"""Small results are counted by lumps of this fraction of the budget."""

DISK: Final = NodeId(1)
FAR: Final = 1 << 50
"""`due` of what no task will read."""


class Client(Protocol):
    """Who submits tasks, called with the store's lock held.

    Attributes:
        first: `order` of its first task.
    """

    first: int

    @property
    def is_nested(self) -> bool:
        """Whether a task of another client waits for it."""

    @property
    def is_open(self) -> bool:
        """Whether somebody still waits for it."""

    @property
    def num_busy(self) -> int:
        """Threads that run a task, or could take one."""

    def admitted(self, number: int, task: Task) -> None:
        """The task's data is in place."""

    def refused(self, number: int, error: BaseException) -> None:
        """The task will never run."""

    def broken(self, error: BaseException) -> None:
        """Nothing will run any more."""


class Token(NamedTuple):
    """Whose task it is, and which."""

    client: Client
    number: int


class Store:
    """Results of graphs, within a budget.

    Args:
        ram: bytes of host memory.
        disk: the file below it and how many bytes it may hold.

    Attributes:
        lock: around everything here.
        num_lent: blocks that the program holds.
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
        self.threads: set[int] = set()  # those that run tasks
        self.inbox: deque[HandleRecord] = deque()
        self.blocks: dict[int, Block] = {}  # by the identity of their owner
        self.small_bytes = 0
        self.num_lent = 0
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
        """Whether more is counted than the budget."""
        return self.ram.used > self.ram.budget

    @property
    def spills(self) -> bool:
        """Whether there is a disk below."""
        return self._disk is not None

    def record(self, name: str, nbytes: int, view: object = None) -> HandleRecord:
        """A new handle."""
        self._numbers += 1
        return HandleRecord(HandleId(self._numbers), nbytes, rounded(nbytes), view, name, "temporary", "data")

    def submit(self, client: Client, number: int, name: str, order: int, blocks: Sequence[Block], room: int, dues: Sequence[int]) -> None:
        """Ask for a task's data: its blocks, and room for what it makes; the client is told, perhaps at once.

        Args:
            room: bytes; 0 for a task that makes nothing.
            dues: of each block, the order of the task that reads it after this one.
        """
        accesses: list[tuple[HandleRecord, Mode]] = [(block.record, R) for block in blocks if block.record is not None]
        dues = list(dues)
        if room:
            made = self.record(f"room for {name}", room)
            made.released = True
            accesses.append((made, SCRATCH))
            dues.append(FAR)
        self._numbers += 1
        task = Task(TaskId(self._numbers), None, name, ("host",), tuple(accesses), {}, order=order, dues=dues, token=Token(client, number))
        self.bring(TaskSubmitted(task))

    def finish(self, task: Task) -> None:
        """A task has ended."""
        self.bring(TaskFinished(task))
        task.token = None  # the machine remembers its last events

    def find(self, owner: Any, nbytes: int, is_array: bool) -> Block:
        """The block of an owner, a new one if it has none."""
        block = self.blocks.get(id(owner))
        if block is None:
            block = self.blocks[id(owner)] = Block(owner, nbytes, is_array=is_array)
        return block

    def adopt(self, block: Block, name: str, due: int) -> None:
        """Count a new block.

        Raises:
            DoesNotFit: the disk has no room for it.
        """
        block.record = self.record(name, block.nbytes, block)
        self.largest = max(self.largest, block.nbytes)
        self.bring(HandleAdopted(block.record, due))

    def note_changed(self, block: Block) -> None:
        """A task may have changed a block that it reads."""
        assert block.record is not None  # it is counted
        self.bring(HandleChanged(block.record))

    def release(self, block: Block) -> None:
        """Nobody reads the block any more."""
        if block.owner is not None:
            self.blocks.pop(id(block.owner), None)
        record, block.record = block.record, None
        if record is not None:
            self.bring(HandleReleased(record))

    def count_small(self, nbytes: int) -> None:
        """So many bytes of small results more, or less."""
        self.small_bytes += nbytes
        while self.small_bytes > len(self._lumps) * self._lump:
            self._lumps.append(self.record("small results", self._lump))
            self.bring(HandleAdopted(self._lumps[-1], FAR, stays=True))
        while self.small_bytes < (len(self._lumps) - 2) * self._lump:
            self.bring(HandleReleased(self._lumps.pop()))

    def lend(self, block: Block) -> None:
        """The program gets the block: counted, and in host memory, until nothing refers to it."""
        owner = block.owner
        self.release(block)
        lent = self.record("lent to the program", block.nbytes)
        try:
            weakref.finalize(owner, self.inbox.append, lent).atexit = False
        except TypeError:  # tells nobody when it dies, so nobody could count it
            return
        self.num_lent += 1
        self.bring(HandleAdopted(lent, FAR, stays=True))

    def bring(self, event: Event) -> None:
        """Advance the core by an event and carry out what follows; the lock is held.

        Raises:
            DoesNotFit: there is no room for what was adopted.
            SchedulerError: the core is broken.
        """
        if self.failure is not None:
            raise self.failure
        while self.inbox:
            self.num_lent -= 1
            self._bring(HandleReleased(self.inbox.popleft()))
        self._bring(event)

    def _bring(self, event: Event) -> None:
        try:
            actions = self.machine.handle(event)
        except DoesNotFit:
            raise  # nothing has changed
        except BaseException as error:  # a bug of ours, or an interrupt that left it half advanced
            self._break(error)
            raise
        self.peak = max(self.peak, self.ram.used)
        for action in actions:
            if type(action) is RunTask:
                token: Token = action.task.token  # type: ignore[assignment]
                token.client.admitted(token.number, action.task)
            elif type(action) is CopyTile:
                assert self._disk is not None
                self._disk.put(action)
            elif type(action) is ForgetObject:
                self._forget(action)
            elif type(action) is ReportFailure:
                token = action.task.token  # type: ignore[assignment]
                token.client.refused(token.number, action.error)

    def too_large(self, key: object, nbytes: int) -> DoesNotFit:
        """Why a task that reads so many bytes at once cannot run, in the words of graphs."""
        taken = sum(record.nbytes for record in self.machine.residency.held)
        below = "" if self.spills else "; without a disk nothing can leave it"
        return DoesNotFit(
            f"task {key!r} reads {nbytes:,} B of results at once, but of {self.ram.budget:,} B of ram {taken:,} B are lent to the "
            f"program or small results{below}; raise ram, name a disk, use smaller chunks, or let go of earlier results",
            self.ram.name,
        )

    def look_for_deadlock(self) -> None:
        """End the latest run if tasks wait for the graphs they compute, those for memory, and nothing else runs or moves: what these tasks read stays
        in memory until they end. The core cannot know, because to it they run."""
        nested = [client for client in self.clients if client.is_nested and client.is_open]
        if not nested or self.failure is not None or self.machine.residency.copies:
            return
        if sum(client.num_busy for client in self.clients) <= len(nested):
            latest = max(nested, key=lambda client: client.first)
            latest.broken(
                DoesNotFit(
                    f"{len(nested)} graphs that are computed within tasks wait for memory that those tasks hold: of {self.ram.budget:,} B of ram "
                    f"{self.ram.used:,} B are taken; raise ram, use fewer workers, or compute nothing within tasks",
                    self.ram.name,
                )
            )

    def _forget(self, action: ForgetObject) -> None:
        block = action.handle.view
        if not isinstance(block, Block):
            return
        if action.node != RAM:
            assert self._disk is not None
            self._disk.discard(block.place)
            block.place = None
        elif block.owner is not None:
            self.blocks.pop(id(block.owner), None)
            block.forget()

    def _copied(self, action: CopyTile, start_ns: int, end_ns: int) -> None:
        with self.lock:
            if self.failure is None:
                block: Block = action.source.handle.view  # type: ignore[assignment]
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

    def _keep(self, block: Block) -> None:
        """What cannot be pickled stays in memory for good, and is counted so."""
        with self.lock:
            kept = self.record("cannot be pickled", block.nbytes)
            weakref.finalize(block, self.inbox.append, kept).atexit = False
            self.num_lent += 1
            self.bring(HandleAdopted(kept, FAR, stays=True))

    def fail(self, error: BaseException) -> None:
        """A thread of ours died: whoever waits is told."""
        with self.lock:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """Nothing runs any more."""
        if not isinstance(error, SchedulerError):
            broken = RuntimeBroken(f"the memory of Dask graphs broke: {type(error).__name__}: {error}; make a new runtime")
            broken.__cause__ = error
            error = broken
        self.failure = self.failure or error
        for client in list(self.clients):
            client.broken(self.failure)

    def close(self) -> None:
        """Give everything back. What is lent stays the program's."""
        with self.lock:
            self.failure = self.failure or SchedulerError("this runtime of Dask graphs is closed; make a new one")
            for client in list(self.clients):
                client.broken(self.failure)
        if self._disk is not None:
            self._disk.stop()
            with suppress(RuntimeError):
                self._disk.join()
        self.blocks.clear()
