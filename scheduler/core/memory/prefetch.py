"""Prefetch: data that the planned order needs next is fetched before its task is admitted.

- Prefetches take free memory, or memory of clean data that is used later. While a task waits for memory they are few, and each replaces data that is
  used later than its own, so they end.
- `Lookahead` walks through the planned tasks of its node: all of them if workers compute on one node only, else those of the node's partition.
  Without partitions, devices rely on tasks that are admitted early, because the node of a later task is unknown.
- At every event the walk continues. It restarts at the first planned task when a task that it has passed misses data again (`_is_over`).
- Beyond the walk, data that the forecast expects back is fetched from the position on at which the forecast has room for it (`Replay.returns`).

Reads in progress are limited, so that the copies of the oldest task never wait for many others. `write_back` frees memory early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Final

from ..events import Action
from ..records import RW, SCRATCH, HandleRecord, Mode, NodeId, R, Replay, Replica, Task
from . import coherence
from .replicas import Replicas
from .write_back import EarlyWriteBack

READS: Final = 6
"""Largest number of prefetches in progress."""

PRESSED: Final = 2
"""Largest number of prefetches in progress while a task waits for memory."""

QUEUE: Final = 2
"""Largest number of prefetches in progress over one link between memories: one that moves and one that follows. More would delay the copies that
tasks wait for. A disk serves several at once, which is faster than one by one."""

AHEAD: Final = 3
"""Budget of a node over the bytes missed by the unfinished tasks that the walk has passed, at which it stops."""

TASKS: Final = 128
"""Largest number of unfinished tasks that the walk has passed."""

EVENTS: Final = 64
"""Number of events after which the walk restarts in any case, if tasks run on one node only, because no event reports some changes.
With several nodes a walk restarts at every event of its node, because other nodes change the data that can be fetched."""

_TO_COME: Final = ("waiting", "ready", "blocked")


class Lookahead:
    """Prefetch and early write-back of one node.

    Args:
        replicas: replicas of all nodes.
        node: node where tasks run.
        is_only: whether tasks run on no other node.
    """

    def __init__(self, replicas: Replicas, node: NodeId, *, is_only: bool) -> None:
        self.replicas = replicas
        self.node = node
        self.is_only = is_only
        memories = sum(not each.is_storage for each in replicas.nodes)
        self._write_back = EarlyWriteBack(replicas, node)
        self._most = READS if memories < len(replicas.nodes) else min(READS, QUEUE * (memories - 1))  # prefetches in progress
        self._walk: Iterator[tuple[Replay, int]] = iter(())  # planned tasks of this node that are to come, as (replay, position)
        self._at: tuple[Replay, int] | None = None  # the next task of the walk; None at its end
        self._behind: dict[Task, int] = {}  # unfinished tasks that the walk has passed, and the bytes that each missed then
        self._end = -1  # `order` of the last task passed
        self._reach = 0  # bytes that tasks may still miss before the walk stops
        self._known = (-1, -1)  # `first_order` of the oldest and of the newest replay when the walk began
        self._most_events = EVENTS if is_only else 1  # during one walk
        self._num_events = 0  # since the walk began
        self._passed = 0  # bytes that the walk has skipped because their link is full
        self._num_ended = 0  # `Copies.num_ended` of the node when the walk began
        self._failed: tuple[HandleRecord, int, int] | None = None  # the latest search for victims in vain, and `Candidates.num_changes` at the time
        self._returned: dict[Replay, tuple[int, int]] = {}  # number of each replay, and how many of its `returns` have been handled

    def run(self, ended: Task | None, actions: list[Action], *, blocked: bool) -> None:
        """Start the copies that should be in progress now.

        Args:
            ended: task that has just ended, if any.
            actions: actions of the event, to which copies are added.
            blocked: whether a task waits for memory of the node.
        """
        replicas = self.replicas
        if self.node == replicas.last and not replicas.num_files:
            return  # all data is already there
        self._num_events += 1
        if ended is not None:
            self._reach += self._behind.pop(ended, 0)
            self._write_back.note(ended)
        if self._is_over():
            self._begin()
        elif self._at is None:
            self._at = self._next()
        if self._at is not None:
            self._prefetch(PRESSED if blocked else READS if replicas.num_files else self._most, actions)
        if self._at is None and not blocked:
            self._prefetch_returning(self._most - replicas.copies.num_arriving(self.node), actions)
        self._write_back.run(actions)
        replicas.missed[self.node] = inf  # data evicted just now is used later than the data fetched for it: the walk has yet to come there

    def _is_over(self) -> bool:
        """Whether tasks that the walk has passed may miss data again, or tasks that it does not know have been added."""
        replicas, replays = self.replicas, self.replicas.foresight.replays
        if self._num_events >= self._most_events or (replays[0].first_order, replays[-1].first_order) != self._known:
            return True
        if self._passed and replicas.copies.num_ended[self.node] != self._num_ended:
            return True
        return replicas.missed[self.node] <= self._end

    def _next(self) -> tuple[Replay, int] | None:
        """Return the next task within reach; None if there is none."""
        return next(self._walk, None) if self._reach > 0 and len(self._behind) < TASKS else None

    def rest(self) -> None:
        """Forget the last replay, now that none is in progress."""
        self._write_back.rest()
        self._returned.clear()
        self._walk, self._at = iter(()), None
        self._behind.clear()

    def _begin(self) -> None:
        """Restart the walk at the first planned task."""
        replicas = self.replicas
        self._end = -1
        self._walk = self._tasks_ahead()
        self._behind.clear()
        self._reach = replicas.nodes[self.node].budget // AHEAD
        self._at = self._next()
        replays = replicas.foresight.replays
        self._known = replays[0].first_order, replays[-1].first_order
        self._num_events = self._passed = 0
        self._num_ended = replicas.copies.num_ended[self.node]

    def _tasks_ahead(self) -> Iterator[tuple[Replay, int]]:
        """Iterate over the unfinished planned tasks of this node, as (replay, position)."""
        for replay in tuple(self.replicas.foresight.replays):
            done, tasks = replay.done, replay.tasks
            for position in self._positions_ahead(replay):
                if not done[position] and not tasks[position].aside:
                    yield replay, position

    def _positions_ahead(self, replay: Replay) -> Iterable[int]:
        """Return the positions of the tasks that run on this node; some may have ended."""
        if self.is_only:
            return range(replay.frontier, len(replay.tasks))
        if self.node not in replay.partition_nodes:
            return ()
        partition = replay.partition_nodes.index(self.node)
        positions, head, done = replay.partitions[partition], replay.heads[partition], replay.done
        while head < len(positions) and done[positions[head]]:
            head += 1
        replay.heads[partition] = head
        return islice(positions, head, None)

    def _prefetch(self, limit: int, actions: list[Action]) -> None:
        """Continue the walk until `limit` prefetches are in progress, memory runs out, or the walk ends."""
        limit -= self.replicas.copies.num_arriving(self.node)
        while self._at is not None and limit > 0:
            replay, position = self._at
            task = replay.tasks[position]
            if not replay.done[position] and task.state in _TO_COME:
                passed = self._passed
                outcome = self._prefetch_for(replay, position, limit, actions)
                limit -= 0 if outcome is None else outcome[0]
                if outcome is None or limit <= 0:  # the task may miss more data: examine it again later
                    self._passed = passed
                    return
                self._reach -= outcome[1]
                self._behind[task] = outcome[1]
            self._end = replay.first_order + position
            self._at = self._next()

    def _distance(self, replay: Replay, position: int) -> int:
        """Return the number of planned tasks before the one at `position` of `replay`."""
        replays = self.replicas.foresight.replays
        distance = position - replays[0].frontier
        for each in replays:
            if each is replay:
                break
            distance += len(each.tasks)
        return distance

    def _prefetch_for(self, replay: Replay, position: int, limit: int, actions: list[Action]) -> tuple[int, int] | None:
        """Fetch the data that one task misses.

        Returns:
            Number of copies started, and bytes that the task will add to the node; None if memory ran out, or nearer tasks need it.
        """
        replicas, node, num_started, nbytes = self.replicas, self.node, 0, 0
        for handle, mode in replay.tasks[position].accesses:
            replica = handle.replicas.get(node)
            if replica is not None and replica.state != "reserved" and mode != SCRATCH:
                continue
            nbytes += handle.size
            if replica is None and num_started < limit:
                distance = self._distance(replay, position)
                source = self._source(handle, mode, replay, position, distance)
                if source is None:
                    continue
                if self._is_full(source):
                    self._passed += handle.size
                    continue
                if is_in_use(handle):
                    self._num_events = self._most_events  # restart the walk at the next event
                    continue  # the program may be writing it elsewhere
                if self._passed and replicas.free_bytes(node) < self._passed + handle.size:
                    return None  # data that was skipped is used sooner
                if not self._fetch(handle, source, distance, actions):
                    return None
                num_started += 1
        return num_started, nbytes

    def _source(self, handle: HandleRecord, mode: Mode, replay: Replay, position: int, distance: int) -> Replica | None:
        """Return the replica to fetch from for a planned task; None if there is nothing to fetch, or not yet.

        Args:
            distance: number of planned tasks before it.
        """
        if not handle.replicas or (mode != R and mode != RW) or handle.lost is not None:
            return None
        source = coherence.best_source(handle, None)
        if source is None:
            return None  # an earlier task will write it
        foresight = self.replicas.foresight
        next_use, overwrites = foresight.next_use(handle)
        if overwrites or next_use > distance:
            return None  # an earlier task will overwrite it; or it would be evicted at once by the next prefetch
        if next_use < distance and foresight.will_change(handle, replay, position):
            return None  # an earlier task on another node will change it
        return source

    def _is_full(self, source: Replica) -> bool:
        """Whether enough copies are in progress over the link from a replica."""
        replicas = self.replicas
        return replicas.copies.num_on(source.node, self.node) >= QUEUE and replicas.is_memory(source.node)

    def _prefetch_returning(self, limit: int, actions: list[Action]) -> None:
        """Fetch data for tasks beyond the walk that the forecast expects back by now."""
        replicas = self.replicas
        order = replicas.foresight.order
        for replay in tuple(replicas.foresight.replays):
            returns = self._returns_of(replay)
            number, index = self._returned.get(replay, (replay.number, 0))
            index = index if number == replay.number else 0
            while index < len(returns):
                begin, position = returns[index]
                if replay.first_order + begin > order or not self._fetch_returning(replay, position, limit, actions):
                    self._returned[replay] = replay.number, index
                    return
                limit = self._most - replicas.copies.num_arriving(self.node)
                index += 1
            self._returned[replay] = replay.number, index

    def _returns_of(self, replay: Replay) -> Sequence[tuple[int, int]]:
        """Return the entries of `Replay.returns` for this node."""
        if not replay.partition_nodes:
            return replay.returns[0] if len(replay.returns) == 1 else ()
        if self.node not in replay.partition_nodes or not replay.returns:
            return ()
        return replay.returns[replay.partition_nodes.index(self.node)]

    def _fetch_returning(self, replay: Replay, position: int, limit: int, actions: list[Action]) -> bool:
        """Fetch the data that a task misses; return False if that must wait."""
        task = replay.tasks[position]
        if replay.done[position] or task.state not in _TO_COME:
            return True
        distance = self._distance(replay, position)
        for handle, mode in task.accesses:
            if self.node in handle.replicas:
                continue
            source = self._source(handle, mode, replay, position, distance)
            if source is None or is_in_use(handle):
                continue
            if limit <= 0 or self._is_full(source) or not self._fetch(handle, source, distance, actions):
                return False
            limit -= 1
        return True

    def _fetch(self, handle: HandleRecord, source: Replica, distance: int, actions: list[Action]) -> bool:
        """Start fetching data that is used after `distance` planned tasks, into free memory or over data used later; return whether it fits."""
        replicas, node_id = self.replicas, self.node
        node = replicas.nodes[node_id]
        keeps = node.extents.keeps_offsets
        offset = node.take(handle.size, handle.data_class, handle.preferred_offset if keeps else -1)
        if offset is None:
            candidates, later_than = replicas.candidates[node_id], replicas.foresight.order + distance
            if self._failed == (handle, later_than, candidates.num_changes):
                return False
            plan = candidates.plan_droppable([handle.size], later_than)
            if plan is None:
                self._failed = handle, later_than, candidates.num_changes
                return False
            (offset,), victims = plan
            replicas.evict(victims, actions)
            node.take_at(offset, handle.size, handle.data_class)
        if keeps:
            handle.preferred_offset = offset
        node.mark()
        actions.append(replicas.copies.start(source, replicas.install(handle, node_id, offset)))
        return True


def is_in_use(handle: HandleRecord) -> bool:
    """Whether an admitted task uses the handle on any node."""
    return any(replica.pins - replica.arriving != replica.outgoing for replica in handle.replicas.values())
