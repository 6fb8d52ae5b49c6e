"""Moving data before it is asked for: what the planned order will need next is fetched, what it will evict next is written back early.

Rules. Prefetches take free memory, or memory of clean data that is used later than what comes in. While a task waits for memory they are few: it is
tried before them whenever something changes, what they bring can be dropped for it at once, and what replaces each other is used sooner and sooner,
by the reckoning that eviction goes by, so they end. Beyond the tasks it has come to, what has left is fetched from the position on from which the
forecast of the planned order has room for it (`Replay.returns`), once. Early write-backs keep a small share of the node clean, lowest rank first,
so that admission rarely waits for one. Beyond that share they take, one at a time, what that forecast says will leave before it is used again
(`UseSchedule.leaves`), as soon as its last use has ended: a link that idles in one part of a step is missing in another. Nothing else is written
that might die unwritten. Reads and writes under way are limited, so that the oldest task's own copy never waits behind many. Looks at the tasks
that will run on its node: all, where workers compute on one node only; else those of the node's partition of the step, if the plan has partitions.
Without them several devices rely on admitting tasks ahead instead, because it is not known yet where a task will run. What is missing is found by
walking through these tasks: on from where the walk stood at the last event, as far as tasks behind it have ended since; and from the first one
again when a task behind it misses what was evicted or overwritten, or waited for a link. What is clean changes with the bytes that are taken.
Neither is looked at anew at every event: that costs as much as many events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Final

from ..events import Action
from ..records import RW, SCRATCH, HandleRecord, Mode, NodeId, R, Replay, Replica, Task
from . import coherence
from .replicas import Replicas
from .victim_selection import is_dirty, is_unused

READS: Final = 6
"""Prefetches under way at most."""

PRESSED: Final = 2
"""The same while a task waits for memory."""

QUEUE: Final = 2
"""The same over one link between memories: one that moves and one behind it. Behind more, what a task asks for next would wait. A disk serves several
at once, sooner than one by one."""

WRITES: Final = 4
"""Copies from the node towards the last tier under way, beyond which nothing is written early."""

AHEAD: Final = 3
"""It looks so far that what the tasks it has passed missed then, and have not ended since, is this fraction of the node's budget."""

CLEAN: Final = 6
"""Early write-backs keep this fraction of the node's budget free or droppable."""

TASKS: Final = 128
"""Tasks that it has passed and that have not ended, at most."""

LOOKS: Final = 2
"""A look for what to write back after every such fraction of the clean share that the node has handed out."""

LEAVING: Final = 1
"""Copies from the node towards the last tier under way, beyond which nothing is written only because it will leave."""

EVENTS: Final = 64
"""Where tasks run on one node only, it walks from the first planned task again after so many events at the latest, for changes that no event
tells. Not often: each task passed takes as long as an event, its records being in no cache. Of several nodes, what others do changes what can be
fetched: each walks at every event of its own."""


_TO_COME: Final = ("waiting", "ready", "blocked")


class Lookahead:
    """Prefetching and early write-back for one node.

    Args:
        node: where tasks run.
        is_only: whether no task runs anywhere else.
    """

    def __init__(self, replicas: Replicas, node: NodeId, *, is_only: bool) -> None:
        self.replicas = replicas
        self.node = node
        self.is_only = is_only
        memories = sum(not each.is_storage for each in replicas.nodes)
        self._most = READS if memories < len(replicas.nodes) else min(READS, QUEUE * (memories - 1))  # prefetches under way
        self._walk: Iterator[tuple[Replay, int]] = iter(())  # planned tasks to come that will run here, as (replay, position)
        self._at: tuple[Replay, int] | None = None  # where it stands; None at its end
        self._behind: dict[Task, int] = {}  # tasks that it has passed and that have not ended, and bytes that each missed then
        self._end = -1  # `order` of the last one
        self._reach = 0  # bytes of what is missing until its end
        self._known = (-1, -1)  # `first_order` of the oldest and of the newest replay when it began
        self._most_events = EVENTS if is_only else 1  # of a walk
        self._num_events = 0  # since it began
        self._passed = 0  # bytes that it has passed over because their link is full
        self._num_ended = 0  # `Copies.num_ended` of the node when it began
        self._looked_at = 0  # what the node had handed out at the last look for what to write back
        self._wanted = 0  # bytes to write back, as of then
        self._returned: dict[Replay, tuple[int, int]] = {}  # of instances of the step, a replay's number and how many of its `returns` are dealt with
        self._leaving: deque[Replica] = deque()  # what had been used last before it leaves, in that order

    def run(self, ended: Task | None, actions: list[Action], *, blocked: bool) -> None:
        """Start what should be under way now.

        Args:
            ended: a task that has just ended.
            actions: of the event; copies are added.
            blocked: whether a task waits for memory of the node.
        """
        replicas = self.replicas
        if self.node == replicas.last and not replicas.num_files:
            return  # everything is where it belongs
        self._num_events += 1
        if ended is not None:
            self._reach += self._behind.pop(ended, 0)
            self._note_leaving(ended)
        if self._is_over():
            self._begin()
        elif self._at is None:
            self._at = self._next()
        if self._at is not None:
            self._prefetch(PRESSED if blocked else READS if replicas.num_files else self._most, actions)
        if self._at is None and not blocked:
            self._prefetch_returning(self._most - replicas.copies.num_arriving(self.node), actions)
        self._write_back(actions)
        replicas.missed[self.node] = inf  # what this look has let go is used later than what it fetched: the walk has yet to come there

    def _is_over(self) -> bool:
        """Whether tasks behind the walk may miss something, or tasks have come that it does not know."""
        replicas, replays = self.replicas, self.replicas.foresight.replays
        if self._num_events >= self._most_events or (replays[0].first_order, replays[-1].first_order) != self._known:
            return True
        if self._passed and replicas.copies.num_ended[self.node] != self._num_ended:
            return True
        return replicas.missed[self.node] <= self._end

    def _next(self) -> tuple[Replay, int] | None:
        """The next task within reach, if any."""
        return next(self._walk, None) if self._reach > 0 and len(self._behind) < TASKS else None

    def rest(self) -> None:
        """No replay is in flight: nothing is kept of the last one."""
        self._leaving.clear()
        self._returned.clear()
        self._walk, self._at = iter(()), None
        self._behind.clear()

    def _begin(self) -> None:
        """Walk from the first planned task again."""
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
        for replay in tuple(self.replicas.foresight.replays):
            done, tasks = replay.done, replay.tasks
            for position in self._positions_ahead(replay):
                if not done[position] and not tasks[position].aside:
                    yield replay, position

    def _positions_ahead(self, replay: Replay) -> Iterable[int]:
        """Positions of the tasks that will run here; some of them may have ended."""
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
        """Go on until so many prefetches are under way, there are no bytes for what comes next, or the walk ends."""
        limit -= self.replicas.copies.num_arriving(self.node)
        while self._at is not None and limit > 0:
            replay, position = self._at
            task = replay.tasks[position]
            if not replay.done[position] and task.state in _TO_COME:
                passed = self._passed
                outcome = self._prefetch_for(replay, position, limit, actions)
                limit -= 0 if outcome is None else outcome[0]
                if outcome is None or limit <= 0:  # it may miss more: it is tried again
                    self._passed = passed
                    return
                self._reach -= outcome[1]
                self._behind[task] = outcome[1]
            self._end = replay.first_order + position
            self._at = self._next()

    def _distance(self, replay: Replay, position: int) -> int:
        """Planned tasks from now until that one."""
        replays = self.replicas.foresight.replays
        distance = position - replays[0].frontier
        for each in replays:
            if each is replay:
                break
            distance += len(each.tasks)
        return distance

    def _prefetch_for(self, replay: Replay, position: int, limit: int, actions: list[Action]) -> tuple[int, int] | None:
        """Fetch what one task misses.

        Returns:
            Copies started and bytes the task will add to the node; None when no bytes were left for them, beside what nearer tasks miss.
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
                    self._num_events = self._most_events  # walk again at the next event
                    continue  # it may be written elsewhere just now: the program does
                if self._passed and replicas.free_bytes(node) < self._passed + handle.size:
                    return None  # what is used sooner comes first
                if not self._fetch(handle, source, distance, actions):
                    return None
                num_started += 1
        return num_started, nbytes

    def _source(self, handle: HandleRecord, mode: Mode, replay: Replay, position: int, distance: int) -> Replica | None:
        """The replica to fetch from for a planned task; None where there is nothing to fetch, or nothing yet.

        Args:
            distance: planned tasks until it.
        """
        if not handle.replicas or (mode != R and mode != RW) or handle.lost is not None:
            return None
        source = coherence.best_source(handle, None)
        if source is None:
            return None  # an earlier task has yet to write it
        foresight = self.replicas.foresight
        next_use, overwrites = foresight.next_use(handle)
        if overwrites or next_use > distance:
            return None  # the same, over old data; or it would go at once for what is fetched next
        if next_use < distance and foresight.will_change(handle, replay, position):
            return None  # elsewhere, before this task reads it
        return source

    def _is_full(self, source: Replica) -> bool:
        """Whether the link from a replica has enough to do."""
        replicas = self.replicas
        return replicas.copies.num_on(source.node, self.node) >= QUEUE and replicas.is_memory(source.node)

    def _prefetch_returning(self, limit: int, actions: list[Action]) -> None:
        """Fetch for tasks beyond the walk what the plan expects back by now."""
        replicas = self.replicas
        order = replicas.foresight.order
        for replay in tuple(replicas.foresight.replays):
            returns = self._returns_of(replay)
            number, at = self._returned.get(replay, (replay.number, 0))
            at = at if number == replay.number else 0
            while at < len(returns):
                begin, position = returns[at]
                if replay.first_order + begin > order or not self._fetch_returning(replay, position, limit, actions):
                    self._returned[replay] = replay.number, at
                    return
                limit = self._most - replicas.copies.num_arriving(self.node)
                at += 1
            self._returned[replay] = replay.number, at

    def _returns_of(self, replay: Replay) -> Sequence[tuple[int, int]]:
        """What the plan says of this node."""
        if not replay.partition_nodes:
            return replay.returns[0] if len(replay.returns) == 1 else ()
        if self.node not in replay.partition_nodes or not replay.returns:
            return ()
        return replay.returns[replay.partition_nodes.index(self.node)]

    def _fetch_returning(self, replay: Replay, position: int, limit: int, actions: list[Action]) -> bool:
        """Fetch what a task misses of the data that has left; or return False, if that is for later."""
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
        """Start fetching data that is used `distance` planned tasks from now, into free memory or over what is used later; or return False."""
        replicas, node_id = self.replicas, self.node
        node = replicas.nodes[node_id]
        keeps = node.extents.keeps_offsets
        offset = node.take(handle.size, handle.data_class, handle.preferred_offset if keeps else -1)
        if offset is None:
            plan = replicas.candidates[node_id].plan_droppable([handle.size], replicas.foresight.order + distance)
            if plan is None:
                return False
            (offset,), victims = plan
            replicas.evict(victims, actions)
            node.take_at(offset, handle.size, handle.data_class)
        if keeps:
            handle.preferred_offset = offset
        node.mark()
        actions.append(replicas.copies.start(source, replicas.install(handle, node_id, offset)))
        return True

    def _write_back(self, actions: list[Action]) -> None:
        """Keep some of the node's memory free or droppable, and the link busy with what will leave."""
        replicas = self.replicas
        if self.node == replicas.last:
            return  # nothing here is ever written elsewhere
        node = replicas.nodes[self.node]
        goal = node.budget // CLEAN
        num_writing = replicas.copies.num_writing[self.node]
        if num_writing >= WRITES or replicas.broken is not None:
            return
        if node.taken - self._looked_at >= goal // LOOKS:
            self._looked_at = node.taken
            self._wanted = goal - (node.budget - node.used)
            if self._wanted > 0:
                self._wanted -= replicas.candidates[self.node].clean_nbytes(self._wanted)
        if self._wanted > 0:
            for replica in replicas.candidates[self.node].dirty(WRITES - num_writing):
                if self._wanted > 0:
                    replicas.write_back(replica, actions)
                    self._wanted -= replica.handle.size
        while self._leaving and num_writing < LEAVING:
            replica = self._leaving.popleft()
            if self._will_leave(replica):
                replicas.write_back(replica, actions)
                num_writing += 1

    def _note_leaving(self, ended: Task) -> None:
        """What a task has used last before it leaves is to be written back."""
        replicas = self.replicas
        if self.node == replicas.last or not replicas.eviction.foresees:
            return
        for handle, mode in ended.accesses:
            schedule = handle.use_schedule
            if mode != SCRATCH and schedule is not None and schedule.leaves:
                replica = handle.replicas.get(self.node)
                if replica is not None and self._will_leave(replica):
                    self._leaving.append(replica)

    def _will_leave(self, replica: Replica) -> bool:
        """Whether a replica is still there, unused and dirty, and the forecast has it leave before its next use."""
        is_there = replica.handle.replicas.get(self.node) is replica
        return is_there and is_unused(replica) and is_dirty(replica) and self.replicas.foresight.leaves(replica)


def is_in_use(handle: HandleRecord) -> bool:
    """Whether an admitted task uses the handle somewhere."""
    return any(replica.pins - replica.arriving != replica.outgoing for replica in handle.replicas.values())
