"""The location of every block: the driver of the ledger, which decides, and of the disk below.

A task of a graph starts as soon as its blocks are in memory: the ledger schedules memory, and `run` schedules threads.

Rules. There is one lock; the thread that advances the ledger carries out the resulting actions. Finalizers only append to an inbox that the next
step drains.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from nntask.hardware import give_back_freed
from scheduler import DoesNotFit, RuntimeBroken, SchedulerError, Shortage
from scheduler.drivers import THREADS
from scheduler.machine import rounded
from scheduler.storage import DiskTier

from .blocks import Action, MemoryBlock, MemoryRequest, RefuseTask, StartTask
from .ledger import Ledger
from .spill import SpillEngine, staging_bytes
from .values import forget

TRIM: Final = 8
"""After traffic of this fraction of the budget, memory that the allocator keeps is given back to the system."""


class Client(Protocol):
    """A source of tasks, called with the store's lock held.

    Attributes:
        first: order of its first task.
        depth: number of graphs whose tasks wait for this client.
    """

    first: int
    depth: int

    @property
    def is_open(self) -> bool:
        """Whether a caller still waits for this client."""

    @property
    def num_busy(self) -> int:
        """Number of threads that run a task or could take one."""

    def admitted(self, request: MemoryRequest) -> None:
        """Take a task whose data is in memory."""

    def refused(self, request: MemoryRequest, error: BaseException | None) -> None:
        """Note that a task will never run: its data is lost, the disk has failed, or, without an error, it does not fit."""

    def broken(self, error: BaseException) -> None:
        """End, because the store can run no more tasks."""


class Store:
    """Results of graphs within a budget.

    Args:
        ram: bytes of host memory.
        disk: the tier file and its capacity in bytes; None without a disk.

    Attributes:
        lock: guards all state of the store.
        ledger: decides what is in memory.
        depths: for each thread that runs tasks, the number of graphs around its graph, by the thread's identifier.
        num_handed_over: number of blocks that the program holds.
        largest: bytes of the largest result so far.
    """

    def __init__(self, ram: int, disk: tuple[DiskTier, int] | None) -> None:
        self.lock = threading.Lock()
        staging = 0 if disk is None else staging_bytes(ram)
        self.ledger = Ledger(ram - staging * THREADS, None if disk is None else disk[1])
        self.clients: set[Client] = set()
        self.depths: dict[int, int] = {}
        self.inbox: deque[int] = deque()  # bytes of lent blocks that the program has dropped
        self.blocks: dict[int, MemoryBlock] = {}  # by the identity of their owner
        self.num_handed_over = 0
        self.largest = 0
        self.failure: BaseException | None = None
        self._untrimmed = 0
        self._actions: deque[Action] = deque()  # not carried out yet
        self._is_carrying_out = False
        self._disk: SpillEngine | None = None
        if disk is not None:
            self._disk = SpillEngine(disk[0], disk[1], staging, self._copied, self.fail)

    @property
    def spills(self) -> bool:
        """Whether there is a disk below."""
        return self._disk is not None

    def advance(self, step: Callable[..., Sequence[Action] | None], *arguments: object) -> Sequence[Action]:
        """Advance the ledger by one of its methods, and carry out the resulting actions; the caller holds the lock.

        Returns:
            The actions.

        Raises:
            DoesNotFit: an adopted block does not fit the disk.
            SchedulerError: the store is broken.
        """
        if self.failure is not None:
            raise self.failure
        while self.inbox:
            self.num_handed_over -= 1
            self.count_small(-self.inbox.popleft())
        try:
            actions = step(*arguments) or ()
        except DoesNotFit:
            raise  # nothing has changed
        except BaseException as error:  # a bug of ours, or an interrupt in the middle of a step
            self._break(error)
            raise
        self._carry_out_all(actions)
        return actions

    def _carry_out_all(self, actions: Sequence[Action]) -> None:
        """Carry out actions after those of earlier steps, one of which may be the cause of this step."""
        self._actions += actions
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            while self._actions:
                self._carry_out(self._actions.popleft())
        finally:
            self._is_carrying_out = False

    def new_block(self, client: Client, owner: Any, nbytes: int, is_array: bool) -> MemoryBlock:
        """Return a block, not yet counted, for the memory of an owner that has none."""
        block = self.blocks[id(owner)] = MemoryBlock(nbytes, rounded(nbytes), owner, client, is_array)
        return block

    def adopt(self, block: MemoryBlock) -> None:
        """Count a new block.

        Raises:
            DoesNotFit: the disk is too small for it.
        """
        self.largest = max(self.largest, block.nbytes)
        try:
            self.advance(self.ledger.adopt, block)
        except DoesNotFit:
            self._unlist(block)
            raise

    def release(self, block: MemoryBlock) -> None:
        """Release a block after its last reader."""
        self._unlist(block)
        if block.is_counted:
            self.advance(self.ledger.release, block)

    def count_small(self, nbytes: int) -> None:
        """Count `nbytes` more bytes of small results, or fewer if negative."""
        self._carry_out_all(self.ledger.count(nbytes))

    def hand_over(self, block: MemoryBlock) -> None:
        """Give a block to the program: it stays in host memory, and counts, until no reference to it is left."""
        self._unlist(block)
        try:
            weakref.finalize(block.owner, self.inbox.append, block.size).atexit = False
        except TypeError:  # has no weak references, so its end would go unnoticed
            self.advance(self.ledger.release, block)
            return
        self.num_handed_over += 1
        self.advance(self.ledger.hand_over, block)

    def _unlist(self, block: MemoryBlock) -> None:
        """Take a block off the list of those whose owner may be part of another result."""
        if self.blocks.get(id(block.owner)) is block:
            del self.blocks[id(block.owner)]

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, StartTask):
            action.request.client.admitted(action.request)
        elif isinstance(action, RefuseTask):
            action.request.client.refused(action.request, action.error)
        elif action.kind == "forget":
            self._unlist(action.block)
            forget(action.block)
        else:
            assert self._disk is not None  # else nothing moves
            (self._disk.discard(action.block) if action.kind == "discard" else self._disk.put(action))

    def too_large(self, task: object, nbytes: int) -> DoesNotFit:
        """Return the error for a task that reads `nbytes` bytes at once, or for the requested results if `task` is None."""
        ledger = self.ledger
        held = f", of which {ledger.fixed:,} B are lent to the program or small results" if ledger.fixed else ""
        full = not self.spills and nbytes <= ledger.budget
        below = "; without a disk earlier results stay there" if full else ""
        what = f"the requested results, {nbytes:,} B in all," if task is None else f"task {task!r}, which reads {nbytes:,} B of results at once,"
        advice = "raise ram, " + ("name a disk, " if full else "") + ("let go of earlier results, " if ledger.fixed else "") + "or use smaller chunks"
        return DoesNotFit(
            Shortage("taken" if full else "task", "ram", nbytes, ledger.budget, ledger.fixed, task="" if task is None else str(task)),
            f"there is no room for {what} in {ledger.budget:,} B of ram{held}{below}",
            advice,
        )

    def look_for_deadlock(self) -> None:
        """End the latest nested run if tasks wait for the graphs that they compute, none of these graphs gets memory, and no other task runs and no
        copy is under way. The blocks of the waiting tasks stay in memory until these tasks end. The ledger cannot detect this, because to it they
        are running."""
        nested = [client for client in self.clients if client.depth and client.is_open]
        ledger = self.ledger
        if not nested or self.failure is not None or ledger.num_copying or sum(client.num_busy for client in self.clients) > len(nested):
            return
        if not self.advance(ledger.force):
            latest = max(nested, key=lambda client: client.first)
            latest.broken(
                DoesNotFit(
                    Shortage("taken", "ram", 0, ledger.budget, ledger.used),
                    f"{len(nested)} graphs that are computed within tasks wait for memory that those tasks hold: of {ledger.budget:,} B of ram "
                    f"{ledger.used:,} B are taken",
                    "raise ram, use fewer workers, or compute nothing within tasks",
                )
            )

    def _copied(self, block: MemoryBlock, error: BaseException | None, stays: bool) -> None:
        """Note the end of a copy: it has succeeded, it has failed with `error`, or the block `stays` because it cannot be pickled."""
        with self.lock:
            if self.failure is None:
                if block.state == "reading" and error is None:
                    self.blocks[id(block.owner)] = block
                if error is None:
                    self.advance(self.ledger.stay if stays else self.ledger.end_copy, block)
                else:
                    self.advance(self.ledger.fail_copy, block, error)
                self.look_for_deadlock()
                self._untrimmed += block.nbytes
        if self._untrimmed > self.ledger.budget // TRIM:
            self._untrimmed = 0
            give_back_freed()

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
            self._disk.close()
        self.blocks.clear()
