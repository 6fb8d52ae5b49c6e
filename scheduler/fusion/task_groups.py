"""Groups of small tasks that one CPU worker runs as one task, because handing out each of them costs as much as running it.

A group is a task with tasks that lead to it alone, so other groups wait for its last member only. These merges are applied to the transitive
reduction of the graph until none applies, and none creates a cycle:
- chain: a task and its only predecessor, if that one has no other successor;
- fork-join: a task and its predecessors, if these have equal predecessors and no other successor, and if either the merge leaves enough siblings to
  occupy all workers, or the data is so small that one worker finishes before another one begins;
- source: a small task without predecessors, and its only successor.
Finally, a cheap group with few successors, such as a norm, is merged into each of them; all but the first recompute it. Tasks are pure functions, so
grouping changes no result. A group skips the kernel of a conditional member whose flag is 0; its data is there, as the step fits the memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R, W
from ..core.step_plan import RecordedTask, StepPlan

MOST_TASKS: Final = 64
"""Largest number of tasks of a group that always run."""
MOST_BYTES: Final = 32 << 20
"""Largest number of bytes that a merged fork-join accesses: tasks of milliseconds are cheap to hand out, and idle workers may take them."""
FORK_BYTES: Final = 4 << 20
"""Number of bytes up to which one worker runs a fork-join although others are idle. For GPT-2 medium as q4_0, whose attention reads 3.5 MiB a layer,
a token took 25 to 26 ms with one group and 33 to 37 ms with two, on two shared cores."""
CHEAP_TASKS: Final = 8
"""Largest number of tasks of a group that is recomputed."""
CHEAP_BYTES: Final = 256 << 10
"""Largest number of bytes that a recomputed group accesses: they take microseconds, another task between groups takes a hundred of them."""


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks that run as one.

    Args:
        tasks: positions of its tasks, ascending.
        clones: those of them that recompute results of an earlier group.
    """

    tasks: Sequence[int]
    clones: Set[int]


def grouped(plan: StepPlan, num_workers: int) -> list[TaskGroup]:
    """Divide the tasks of a step into groups.

    Args:
        plan: the step.
        num_workers: number of CPU workers.

    Returns:
        The groups in an order that respects all dependencies. Each task is in one group, recomputed ones in several.
    """
    graph = _Groups(plan)
    waiting = set(graph.members)
    while waiting:
        group = min(waiting)
        waiting.discard(group)
        if group in graph.members:
            waiting |= graph.merge_predecessors(group, num_workers)
    for group in sorted(graph.members):
        if group in graph.members:
            graph.recompute_in_successors(group, 2 * num_workers)
    return graph.in_order()


class _Groups:
    """Groups and the edges between them. The number of a group is the position of its first member.

    Attributes:
        members: positions of the tasks of each group.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.members = {position: [position] for position in range(len(plan.tasks))}
        self._before = _transitive_reduction(plan.predecessors)
        self._after: dict[int, set[int]] = {position: set() for position in self.members}
        for position, before in self._before.items():
            for each in before:
                self._after[each].add(position)
        self._data = {position: {handle for handle, _ in task.accesses} for position, task in enumerate(plan.tasks)}
        self._shares, self._uncertain = _shares(plan), _uncertain(plan)
        self._clones: dict[int, set[int]] = {}

    def merge_predecessors(self, group: int, num_workers: int) -> Set[int]:
        """Merge a group with its predecessors if it ends a chain or a fork-join; return the groups for which another merge may now apply."""
        before = self._before[group]
        if len(before) > 1 and (sources := self._small_sources(group)) and self._may_join([group, *sources]):
            return {self._join([group, *sources])}
        if not before or any(self._after[other] != {group} for other in before):
            return set()
        joined = sorted(before)
        if len(before) > 1:
            common = self._before[joined[0]]
            if not common or any(self._before[other] != common for other in joined):
                return set()
            num_siblings = sum(self._before[other] == common for other in self._after[min(common)])
            nbytes = self._nbytes([*joined, group])
            if nbytes > MOST_BYTES or (num_siblings - len(joined) + 1 < num_workers and nbytes > FORK_BYTES):
                return set()
        joined.append(group)
        if not self._may_join(joined):
            return set()
        whole = self._join(joined)
        return {whole, *self._after[whole]}

    def _small_sources(self, group: int) -> list[int]:
        """Return the predecessors of a group that have no predecessors, no other successor, and little data."""
        sources = [other for other in self._before[group] if not self._before[other] and self._after[other] == {group}]
        return [other for other in sources if self._nbytes([other]) <= CHEAP_BYTES]

    def _may_join(self, groups: Sequence[int]) -> bool:
        """Whether the tasks of some groups may run as one: equal kinds and priorities, on any CPU worker, and not too many of them.

        At most one of them writes flags, since a task writes flags for others to one handle at most. None accesses data that may be lost because the
        task that writes it is skipped: a group always runs.
        """
        tasks = [self._plan.tasks[position] for group in groups for position in self.members[group]]
        alike = len({(task.kinds, task.priority) for task in tasks}) == 1 and all(map(_is_plain, tasks))
        alike = alike and all(self._data[group].isdisjoint(self._uncertain) for group in groups)
        num_flags = sum(task.condition is not None and task.condition.flags >= 0 for task in tasks)
        return alike and num_flags <= 1 and sum(task.condition is None or task.condition.guard < 0 for task in tasks) <= MOST_TASKS

    def _nbytes(self, groups: Sequence[int]) -> int:
        """Return the bytes that some groups are expected to read and write."""
        shares = self._shares
        return int(sum(handle.spec.size * shares[handle] for handle in set[HandleRecord]().union(*(self._data[group] for group in groups))))

    def recompute_in_successors(self, group: int, limit: int) -> None:
        """Merge a cheap group into each of its successors, if it has several of them but fewer than `limit`."""
        first, *others = sorted(self._after[group]) or [group]
        if not others or len(others) >= limit or not self._is_cheap(group):
            return
        if not all(self._may_join([group, other]) for other in (first, *others)):
            return
        tasks, data, before = self.members[group], self._data[group], self._before[group]
        results = {handle for position in tasks for handle, mode in self._plan.tasks[position].accesses if mode == W}
        readers = {position for handle in results for position in self._plan.uses[handle].positions}
        for other in others:
            self.members[other] = sorted({*tasks, *self.members[other]})
            self._clones.setdefault(other, set()).update(tasks)
            self._data[other] |= data
            self._after[group].discard(other)
            self._before[other].discard(group)
            self._link(before, other)
        whole = self._join([group, first])
        for other, members in self.members.items():  # edges to further readers of the results, once implied by edges through `others`
            if other != whole and other not in others and not readers.isdisjoint(members):
                self._link({whole}, other)

    def _link(self, before: Set[int], after: int) -> None:
        """Add edges from the groups `before` to the group `after`."""
        for each in before:
            self._before[after].add(each)
            self._after[each].add(after)

    def _is_cheap(self, group: int) -> bool:
        """Whether a group may be recomputed: it is small, writes only temporaries that nothing else writes, and reads data that stays unchanged."""
        tasks, uses = self.members[group], self._plan.uses
        if self._clones.get(group) or len(tasks) > CHEAP_TASKS or sum(handle.spec.size for handle in self._data[group]) > CHEAP_BYTES:
            return False
        for position in tasks:
            for handle, mode in self._plan.tasks[position].accesses:
                use = uses[handle]
                if mode == W:
                    is_pure = self._plan.owned.get(handle) is False and use.positions[0] == position == use.last_writer
                else:
                    is_pure = mode == SCRATCH or (mode == R and (use.last_writer is None or use.last_writer < position))
                if not is_pure:
                    return False
        return True

    def _join(self, groups: Sequence[int]) -> int:
        """Merge groups that no path through another group connects; return the number of the merged group."""
        whole, joined = min(groups), set(groups)
        clones = [self._clones.pop(group, set()) for group in groups]
        members = [set(self.members.pop(group)) for group in groups]
        own = set[int]().union(*(tasks - copied for tasks, copied in zip(members, clones, strict=True)))
        self.members[whole], self._clones[whole] = sorted(own.union(*clones)), set[int]().union(*clones) - own
        self._data[whole] = set().union(*(self._data.pop(group) for group in groups))
        for edges, reverse in ((self._before, self._after), (self._after, self._before)):
            outside = set[int]().union(*(edges.pop(group) for group in groups)) - joined
            for other in outside:
                reverse[other] = (reverse[other] - joined) | {whole}
            edges[whole] = outside
        return whole

    def in_order(self) -> list[TaskGroup]:
        """Return all groups in topological order; among several ready ones, the one with the earliest first member comes first."""
        num_missing = {group: len(before) for group, before in self._before.items()}
        ready = [group for group, count in num_missing.items() if not count]
        heapq.heapify(ready)
        ordered = []
        while ready:
            group = heapq.heappop(ready)
            ordered.append(TaskGroup(self.members[group], self._clones.get(group, set())))
            for other in self._after[group]:
                num_missing[other] -= 1
                if not num_missing[other]:
                    heapq.heappush(ready, other)
        assert len(ordered) == len(self.members)
        return ordered


def _is_plain(task: RecordedTask) -> bool:
    """Whether any CPU worker may run the task."""
    return task.kinds[0] == "cpu" and task.pin is None and not task.aside


def _uncertain(plan: StepPlan) -> set[HandleRecord]:
    """Return the data that is lost if a conditional task is skipped."""
    conditional = [task for task in plan.tasks if task.condition is not None and task.condition.guard >= 0]
    return {handle for task in conditional for handle, mode in task.accesses if mode == W}


def _shares(plan: StepPlan) -> dict[HandleRecord, float]:
    """Return the expected share of uses that take place, for data that only conditional tasks use."""
    shares: dict[HandleRecord, float] = {}
    for task in plan.tasks:
        for handle, _ in task.accesses:
            shares[handle] = max(task.share, shares.get(handle, 0.0))
    return shares


def _transitive_reduction(predecessors: Sequence[Set[int]]) -> dict[int, set[int]]:
    """Return the predecessors of each task without those that are also before another one of them."""
    ancestors: list[int] = []  # bit set for each task
    direct = {}
    for position, before in enumerate(predecessors):
        indirect = 0
        for each in before:
            indirect |= ancestors[each]
        direct[position] = {each for each in before if not indirect >> each & 1}
        for each in before:
            indirect |= 1 << each
        ancestors.append(indirect)
    return direct
