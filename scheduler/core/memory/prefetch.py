"""Prefetch: data that the planned order needs next is fetched before its task is admitted.

- `Lookahead` computes its window from the frontier: the next unfinished planned tasks of its node, until the bytes that they miss exceed its reach.
  These are all tasks if workers compute on one node only, else those of the node's partition. Without partitions, devices rely on tasks that are
  admitted early, because the node of a later task is unknown.
- Data that the window misses is fetched in planned order, until enough copies are in progress: into free memory, or over clean data that is used
  later. While a task waits for memory the copies are few, and each replaces data that is used later than its own, so they end.
- Then data that the forecast expects back is fetched from the position on at which the forecast has room for it (`ReplayPlan.returns`).

The copies are few, because the copies that a task waits for follow them. `write_back` frees memory early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, Literal

from ..events import Action
from ..records import RW, HandleRecord, NodeId, R, Replay, Replica, Task
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
"""Budget of a node over the bytes that the tasks of a window miss. On the only node where tasks run, data that was fetched for them and not used yet
counts as missing: without that, steps over a disk take up to 8 % longer. Devices that share a step take up to 5 % longer with it."""

TASKS: Final = 128
"""Largest number of tasks of a window."""

STRIDE: Final = 2
"""Number of tasks of the node that end before a window is computed again, if no data there was dropped."""

COMPLETE_STRIDE: Final = 16
"""The same number for a window that missed nothing. Computing it every second task would take as long as the tasks' own events."""

_TO_COME: Final = ("waiting", "ready", "blocked")

Outcome = Literal["nothing", "started", "in use", "full link", "no room"]
"""Outcome of an attempt to fetch data: there is nothing to fetch; its copy was started; or the reason why it must wait."""


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
        self._num_ended = 0  # number of tasks of the node that have ended
        self._changes: tuple[object, ...] = ()  # counters of events that change a window, when it was last computed
        self._computed: list[tuple[HandleRecord, Replay, int]] = []  # data that the window misses, as far as it was asked for
        self._remainder: Iterator[tuple[HandleRecord, Replay, int]] = iter(())  # computes what follows
        self._is_complete = False  # whether it missed nothing
        self._num_copied = -1  # number of copies to the node that had ended at the last search for data to fetch
        self._waits = False  # whether data waited then for memory, a link, or its use elsewhere
        self._failed: tuple[HandleRecord, int, int] | None = None  # the latest search for victims in vain, and `Candidates.num_changes` at the time

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
        if ended is not None:
            self._num_ended += 1
            self._write_back.note(ended)
        most = PRESSED if blocked else READS if replicas.num_files else self._most
        limit = most - replicas.copies.num_arriving(self.node)
        if limit > 0 and self._fetch_window(limit, actions) and not blocked:
            self._fetch_returning(actions)
        self._write_back.run(actions)

    def rest(self) -> None:
        """Forget the last replay, now that none is in progress."""
        self._write_back.rest()
        self._changes, self._computed, self._remainder = (), [], iter(())

    def _fetch_window(self, limit: int, actions: list[Action]) -> bool:
        """Start at most `limit` copies of data that the window misses; return whether more copies may be started, for tasks beyond it."""
        replicas, node = self.replicas, self.node
        may_differ = self._renew_window()
        num_ended = replicas.copies.num_ended[node]
        is_idle = self._waits and not replicas.copies.num_arriving(node)
        # Without other nodes with tasks, only a renewed window or the end of a copy can change the result of the last search. Data that waited is
        # tried again as well once nothing is arriving, because then no copy will end. Tasks on other nodes change data without a trace here.
        if self.is_only and not may_differ and num_ended == self._num_copied and not is_idle:
            return not self._waits
        self._num_copied, self._waits = num_ended, False
        queued = 0  # bytes that wait for a full link, and are used before those that follow
        for handle, replay, position in self._missing():
            if node in handle.replicas or not handle.replicas or not self._is_to_come(replay, position):
                continue
            outcome = self._fetch(handle, replay, position, queued, actions)
            if outcome == "nothing":
                continue
            self._waits = self._waits or outcome != "started"
            queued += handle.spec.size if outcome == "full link" else 0
            limit -= outcome == "started"
            if not limit or outcome == "no room":
                return False
        return True

    def _is_to_come(self, replay: Replay, position: int) -> bool:
        """Return whether a planned task has neither ended nor been admitted, and will not be skipped."""
        task = replay.tasks[position]
        return not replay.done[position] and task.state in _TO_COME and self.replicas.foresight.will_run(replay, task)

    def _renew_window(self) -> bool:
        """Start to compute the window anew if it may have changed; return whether it may have."""
        replicas = self.replicas
        stride = COMPLETE_STRIDE if self._is_complete else STRIDE
        changes = (self._num_ended // stride, replicas.num_missed[self.node], replicas.num_flag_writes, *replicas.foresight.replays)
        if changes == self._changes:
            return False
        self._changes, self._is_complete = changes, False
        self._computed, self._remainder = [], self._window()
        return True

    def _missing(self) -> Iterator[tuple[HandleRecord, Replay, int]]:
        """Iterate over data that the window missed when it was computed, with the replay and the position of a task that was to read it."""
        yield from self._computed
        for access in self._remainder:
            self._computed.append(access)
            yield access

    def _window(self) -> Iterator[tuple[HandleRecord, Replay, int]]:
        """Compute the window: iterate over the data that it misses."""
        replicas, node, is_only = self.replicas, self.node, self.is_only
        reach = most = replicas.nodes[node].budget // AHEAD
        for replay, position in islice(self._tasks_ahead(), TASKS):
            if not self._is_to_come(replay, position):
                continue
            for handle, mode in replay.tasks[position].accesses:
                replica = handle.replicas.get(node)
                if replica is not None and replica.state != "reserved" and (replica.last_use or not is_only):
                    continue
                reach -= handle.spec.size
                if replica is None and (mode == R or mode == RW):
                    yield handle, replay, position
            if reach <= 0:
                return
        self._is_complete = reach == most

    def _tasks_ahead(self) -> Iterator[tuple[Replay, int]]:
        """Iterate over the unfinished planned tasks of this node, as (replay, position)."""
        for replay in tuple(self.replicas.foresight.replays):
            done, tasks = replay.done, replay.tasks
            for position in self._positions_ahead(replay):
                if not done[position] and not tasks[position].spec.aside:
                    yield replay, position

    def _positions_ahead(self, replay: Replay) -> Iterable[int]:
        """Return the positions of the tasks that run on this node; some may have ended."""
        if self.is_only:
            return range(replay.frontier, len(replay.tasks))
        if self.node not in replay.partition_nodes:
            return ()
        partition = replay.partition_nodes.index(self.node)
        positions, head, done = replay.plan.partitions[partition], replay.heads[partition], replay.done
        while head < len(positions) and done[positions[head]]:
            head += 1
        replay.heads[partition] = head
        return islice(positions, head, None)

    def _fetch_returning(self, actions: list[Action]) -> None:
        """Fetch data for tasks beyond the window that the forecast expects back by now."""
        replicas = self.replicas
        order = replicas.foresight.order
        for replay in tuple(replicas.foresight.replays):
            which = replay.partition_nodes.index(self.node) if self.node in replay.partition_nodes else 0
            if len(replay.plan.returns) != max(len(replay.partition_nodes), 1):
                continue  # the forecast was of other devices
            returns = replay.plan.returns[which]
            for index in range(replay.returned[which], len(returns)):
                begin, position = returns[index]
                if replay.first_order + begin > order or not self._fetch_for(replay, position, actions):
                    return
                replay.returned[which] = index + 1

    def _fetch_for(self, replay: Replay, position: int, actions: list[Action]) -> bool:
        """Fetch the data that a task misses; return False if that must wait."""
        if not self._is_to_come(replay, position):
            return True
        for handle, mode in replay.tasks[position].accesses:
            if self.node in handle.replicas or not handle.replicas or (mode != R and mode != RW):
                continue
            if self.replicas.copies.num_arriving(self.node) >= self._most:
                return False
            if self._fetch(handle, replay, position, 0, actions) in ("full link", "no room"):
                return False
        return True

    def _fetch(self, handle: HandleRecord, replay: Replay, position: int, queued: int, actions: list[Action]) -> Outcome:
        """Start fetching absent data for a planned task, into free memory or over data that is used later.

        Args:
            queued: bytes of memory that are kept free for data of earlier tasks.
        """
        replicas, node_id = self.replicas, self.node
        distance = self._distance(replay, position)
        source = self._source(handle, replay, position, distance)
        if source is None:
            return "nothing"
        if replicas.copies.num_on(source.node, node_id) >= QUEUE and replicas.is_memory(source.node):
            return "full link"
        if is_in_use(handle):
            return "in use"  # the program may be writing it elsewhere
        if queued and replicas.free_bytes(node_id) < queued + handle.spec.size:
            return "no room"
        node = replicas.nodes[node_id]
        keeps = node.extents.keeps_offsets
        offset = node.take(handle.spec.size, handle.spec.data_class, handle.preferred_offset if keeps else -1)
        if offset is None:
            candidates, later_than = replicas.candidates[node_id], replicas.foresight.order + distance
            if self._failed == (handle, later_than, candidates.num_changes):
                return "no room"
            plan = candidates.plan_droppable([handle.spec.size], later_than)
            if plan is None:
                self._failed = handle, later_than, candidates.num_changes
                return "no room"
            (offset,), victims = plan
            replicas.evict(victims, actions)
            node.take_at(offset, handle.spec.size, handle.spec.data_class)
        if keeps:
            handle.preferred_offset = offset
        node.mark()
        actions.append(replicas.copies.start(source, replicas.install(handle, node_id, offset)))
        return "started"

    def _distance(self, replay: Replay, position: int) -> int:
        """Return the number of planned tasks before the one at `position` of `replay`."""
        replays = self.replicas.foresight.replays
        distance = position - replays[0].frontier
        for earlier in replays:
            if earlier is replay:
                break
            distance += len(earlier.tasks)
        return distance

    def _source(self, handle: HandleRecord, replay: Replay, position: int, distance: int) -> Replica | None:
        """Return the replica to fetch from for a planned task; None if there is nothing to fetch, or not yet.

        Args:
            distance: number of planned tasks before it.
        """
        source = coherence.best_source(handle, None)
        if source is None or handle.lost is not None:
            return None  # an earlier task will write it
        foresight = self.replicas.foresight
        next_use, overwrites = foresight.next_use(handle)
        if overwrites or next_use > distance:
            return None  # an earlier task will overwrite it; or it would be evicted at once by the next prefetch
        if next_use < distance and foresight.will_change(handle, replay, position):
            return None  # an earlier task on another node will change it
        return source


def is_in_use(handle: HandleRecord) -> bool:
    """Whether an admitted task uses the handle on any node."""
    return any(replica.pins - replica.arriving != replica.outgoing for replica in handle.replicas.values())
