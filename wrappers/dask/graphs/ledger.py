"""The ledger of Dask results: the bytes in memory and on the disk, the tasks that ask for memory, and the blocks that leave for them.

A pure state machine without threads, clocks or I/O: each method returns the actions that the caller carries out.

Invariants:
- A request takes all its bytes at once or none, so an admitted one runs and ends; a waiting one holds nothing.
- Requests are admitted in order, those of nested graphs first, because the tasks that wait for these graphs hold memory.
- Every block that may leave has bytes reserved on the disk, so writes never wait.
- If no admitted request and no copy can free bytes, the first waiting request is refused. So nothing hangs, unless admitted tasks wait for others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from scheduler import DoesNotFit, Shortage

from .blocks import COPYING, TRANSITIONS, Action, MemoryBlock, MemoryRequest, MoveBlock, RefuseTask, StartTask, Step


class Ledger:
    """The bytes of results, within a budget.

    Args:
        budget: bytes of memory.
        disk: bytes of the disk; None without one, so that no block can leave.

    Attributes:
        used: bytes counted in memory, perhaps above the budget, since a result counts as soon as its size is known.
        peak: largest number of bytes counted at once.
        fixed: bytes that never leave: small results, blocks lent to the program, and blocks that cannot be written.
        disk_used: bytes reserved on the disk.
        num_copying: number of copies in progress.
        num_evictions: number of blocks dropped from memory for others.
        written, read: bytes copied so far.
        broken: error of the disk after which nothing is written any more.
    """

    def __init__(self, budget: int, disk: int | None) -> None:
        self.budget = budget
        self.disk = disk
        self.used = self.peak = self.fixed = self.disk_used = 0
        self.num_copying = self.num_evictions = self.written = self.read = 0
        self.broken: BaseException | None = None
        self._num_blocks = self._num_admitted = 0
        self._latest = 0  # order of the latest request
        self._waiting: list[tuple[int, int, MemoryRequest]] = []  # sorted
        self._clean: list[tuple[int, int, MemoryBlock]] = []  # unused blocks by next use; their writes have ended or are under way
        self._dirty: list[tuple[int, int, MemoryBlock]] = []
        self._queues = {"memory": self._dirty, "writing": self._clean, "both": self._clean}

    @property
    def is_full(self) -> bool:
        """Whether more bytes are counted than the budget."""
        return self.used > self.budget

    def request(self, request: MemoryRequest) -> list[Action]:
        """Ask for the memory of a task; `StartTask` or `RefuseTask` follows, perhaps later."""
        self._latest = request.order
        insort(self._waiting, (-request.depth, request.order, request))
        return self._admit_waiting([])

    def finish(self, request: MemoryRequest) -> list[Action]:
        """Take back the memory of a task that has ended."""
        actions: list[Action] = []
        self._let_go(request, actions)
        return self._admit_waiting(actions)

    def withdraw(self, client: object) -> list[Action]:
        """Remove the waiting requests of a client, whose tasks will not run."""
        self._waiting = [entry for entry in self._waiting if entry[-1].client is not client]
        return self._admit_waiting([])

    def force(self) -> list[Action]:
        """Admit any waiting request that fits, because the admitted ones wait for it; return no actions if there is none.

        If none fits with the result that it is expected to have, the smallest possible results decide.
        """
        actions: list[Action] = []
        if not any(self._try(entry, actions) for entry in self._waiting[:]):
            for _, _, request in self._waiting:
                request.result_nbytes = min(request.result_nbytes, request.min_nbytes)
            any(self._try(entry, actions) for entry in self._waiting[:])
        return actions

    def adopt(self, block: MemoryBlock) -> None:
        """Count a block that is in memory now.

        Raises:
            DoesNotFit: it does not fit the disk; nothing has changed.
        """
        if self.disk is not None:
            if self.disk_used + block.size > self.disk:
                raise DoesNotFit(Shortage("full", "disk", block.size, self.disk, self.disk_used))
            self.disk_used += block.size
        self._num_blocks += 1
        block.number = self._num_blocks
        block.is_counted = True
        self._take(block.size)
        self._enter(block)

    def release(self, block: MemoryBlock) -> list[Action]:
        """Free a block that nothing will read any more, at once or when its copy or its last task has ended."""
        actions: list[Action] = []
        self._release(block, actions)
        return self._admit_waiting(actions)

    def hand_over(self, block: MemoryBlock) -> list[Action]:
        """Replace a block by fixed bytes, because the program holds its memory from now on; `count` with fewer bytes ends that."""
        actions: list[Action] = []
        self.fixed += block.size
        self.used += block.size
        self._release(block, actions)
        return actions

    def count(self, nbytes: int) -> Sequence[Action]:
        """Count `nbytes` more fixed bytes, or fewer if negative."""
        self.fixed += nbytes
        if nbytes > 0:
            self._take(nbytes)
            return ()
        self.used += nbytes
        return self._admit_waiting([]) if self._waiting else ()

    def change(self, block: MemoryBlock) -> None:
        """Note that a task has changed a block in place, so that its copy on the disk, finished or in progress, is out of date."""
        self._step(block, "changed")

    def end_copy(self, block: MemoryBlock) -> list[Action]:
        """Note that a block was written or read."""
        actions: list[Action] = []
        if block.state == "reading":
            self.read += block.nbytes
        else:
            self.written += block.nbytes
        self._end_copy(block, "copied", actions)
        for request in block.waiting:
            request.num_arriving -= 1
            if not request.num_arriving:  # never of a refused one, one of whose reads has failed
                actions.append(StartTask(request))
        block.waiting = []
        return self._admit_waiting(actions)

    def fail_copy(self, block: MemoryBlock, error: BaseException) -> list[Action]:
        """Note a failed copy. A block that cannot be read is lost; after a failed write nothing is written any more."""
        actions: list[Action] = []
        if block.state == "reading":
            block.error = error
            self.used -= block.size
        else:
            self.broken = error
        self._end_copy(block, "failed", actions)
        for request in block.waiting:
            if request.is_admitted:
                self._let_go(request, actions)
                actions.append(RefuseTask(request, error))
        block.waiting = []
        return self._admit_waiting(actions)

    def stay(self, block: MemoryBlock) -> list[Action]:
        """Note that a block cannot be written: it stays in memory until it is released."""
        actions: list[Action] = []
        self._leave(block)
        block.stays = True
        self.fixed += block.size
        self._end_copy(block, "failed", actions)
        return self._admit_waiting(actions)

    def _admit_waiting(self, actions: list[Action]) -> list[Action]:
        """Admit waiting requests as far as memory reaches, and refuse those that can never run."""
        while self._waiting:
            entries = self._waiting[:1] if self._is_busy else self._waiting[:]
            if any(self._try(entry, actions) for entry in entries):
                continue
            if self._is_busy:
                break
            entry = self._waiting[0]
            request = entry[-1]
            if request.result_nbytes > request.min_nbytes:  # its result may be smaller than others of its kind
                request.result_nbytes = request.min_nbytes
            else:
                self._waiting.remove(entry)
                actions.append(RefuseTask(request, self.broken))
        return actions

    @property
    def _is_busy(self) -> bool:
        """Whether an admitted request or a copy will end, and may free bytes then."""
        return bool(self._num_admitted or self.num_copying)

    def _try(self, entry: tuple[int, int, MemoryRequest], actions: list[Action]) -> bool:
        """Admit a waiting request, or start writing what is in its way; return whether anything has happened."""
        request = entry[-1]
        error = next((block.error for block in request.blocks if block.error is not None), None)
        victims = self._victims_of(request) if error is None else []
        if victims is None:
            return False
        if all(victim.state == "both" for victim in victims):
            self._waiting.remove(entry)
            if error is None:
                self._admit(request, victims, actions)
            else:
                actions.append(RefuseTask(request, error))
            return True
        num_copying = self.num_copying
        for victim in victims:
            if victim.state == "memory":
                self._step(victim, "write")
                self.num_copying += 1
                actions.append(MoveBlock("write", victim))
        return self.num_copying > num_copying

    def _missing(self, request: MemoryRequest) -> int:
        return request.result_nbytes + sum([block.size for block in request.blocks if block.state == "disk"])

    def _victims_of(self, request: MemoryRequest) -> list[MemoryBlock] | None:
        """Return the unused blocks to drop for a request, those used last first; None if they are too few."""
        missing = self._missing(request)
        excess = self.used + missing - self.budget
        victims: list[MemoryBlock] = []
        if not missing or excess <= 0:
            return victims
        own = set(request.blocks)
        dirty = self._dirty if self.broken is None else []
        for _, _, block in heapq.merge(reversed(self._clean), reversed(dirty), key=self._price):
            if block not in own:
                victims.append(block)
                excess -= block.size
                if excess <= 0:
                    return victims
        return None

    def _price(self, entry: tuple[int, int, MemoryBlock]) -> float:
        """Return the copies that dropping an unused block takes, its return included, over the number of tasks until then."""
        next_use, _, block = entry
        return (2.0 if block.state == "memory" else 1.0) / max(next_use - self._latest, 1)

    def _admit(self, request: MemoryRequest, victims: Iterable[MemoryBlock], actions: list[Action]) -> None:
        """Drop blocks for a request, give it its own, and start reading those that are on the disk only."""
        for victim in victims:
            self._step(victim, "dropped")
            self.used -= victim.size
            self.num_evictions += 1
            actions.append(MoveBlock("forget", victim))
        self._take(self._missing(request))
        request.is_admitted = True
        self._num_admitted += 1
        for block in request.blocks:
            self._leave(block)
            block.num_pins += 1
            if block.state == "disk":
                self._step(block, "read")
                self.num_copying += 1
                actions.append(MoveBlock("read", block))
            if block.state == "reading":
                block.waiting.append(request)
                request.num_arriving += 1
        if not request.num_arriving:
            actions.append(StartTask(request))

    def _let_go(self, request: MemoryRequest, actions: list[Action]) -> None:
        request.is_admitted = False
        self._num_admitted -= 1
        self.used -= request.result_nbytes
        for block in request.blocks:
            block.num_pins -= 1
            if not block.num_pins:
                self._enter(block)
                self._free_if_dead(block, actions)

    def _end_copy(self, block: MemoryBlock, step: Step, actions: list[Action]) -> None:
        self.num_copying -= 1
        self._step(block, step)
        self._free_if_dead(block, actions)

    def _release(self, block: MemoryBlock, actions: list[Action]) -> None:
        self._leave(block)
        block.is_counted = False
        self._free_if_dead(block, actions)

    def _free_if_dead(self, block: MemoryBlock, actions: list[Action]) -> None:
        """Free a released block that no task and no copy uses any more."""
        if block.is_counted or block.num_pins or block.state in COPYING:
            return
        if block.stays:
            self.fixed -= block.size
        if block.state == "memory" or block.state == "both":
            self.used -= block.size
            actions.append(MoveBlock("forget", block))
        if self.disk is not None:
            self.disk_used -= block.size
            actions.append(MoveBlock("discard", block))

    def _take(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def _step(self, block: MemoryBlock, step: Step) -> None:
        self._leave(block)
        block.state = TRANSITIONS[block.state, step]
        self._enter(block)

    def _queue_of(self, block: MemoryBlock) -> list[tuple[int, int, MemoryBlock]] | None:
        """Return the queue that lists a block; None if it is in use or cannot leave."""
        if self.disk is None or block.num_pins or block.stays or not block.is_counted:
            return None
        return self._queues.get(block.state)

    def _enter(self, block: MemoryBlock) -> None:
        queue = self._queue_of(block)
        if queue is not None:
            insort(queue, (block.next_use, block.number, block))

    def _leave(self, block: MemoryBlock) -> None:
        queue = self._queue_of(block)
        if queue is not None:
            del queue[bisect_left(queue, (block.next_use, block.number))]
