"""Which tasks of a recorded step CPU workers should run as one, where tasks are so small that handing them out costs as much as running them.

A group is a task and what only leads to it: nothing outside waits for a member but for the last, and none is made to wait that could have run beside.
Two rules, applied until neither changes anything, on the edges that no longer way makes redundant:

- a chain: a task, and the only one before it, if that one is before no other;
- a fork that meets again: tasks with the same tasks before them and the same single one after them run one by one, as long as enough others
  remain that wait for the same as they do, one for each worker, or where all of them read so little that it is over before another worker has
  begun. So queries, keys and values of some heads, their attention and its product with some rows of a matrix become one group, and the other
  heads another one, or the same.

Contracting either leaves no circle. Then what is cheap and followed by few groups, such as a norm, goes into each of these: all but the first make it
again, for themselves, instead of waiting for a task between. Tasks are pure, so they make the same bits.

Pure; which groups there are changes no result.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from ..core.records import SCRATCH, HandleRecord, R, W
from ..core.step_plan import RecordedTask, StepPlan

MOST_TASKS: Final = 64
"""Most tasks of a group."""
MOST_BYTES: Final = 32 << 20
"""Most bytes of a fork that becomes a group: to hand out a task that takes milliseconds costs nothing, and another worker may be free for it."""
FORK_BYTES: Final = 4 << 20
"""Bytes up to which one worker runs what several could. For GPT-2 medium as q4_0, whose attention reads 3.5 MiB a layer in one group or two, a token
took 25 to 26 ms or 33 to 37 on two cores that others used too."""
CHEAP_TASKS: Final = 8
"""Most tasks of what is made again."""
CHEAP_BYTES: Final = 256 << 10
"""Most bytes that they read and write: microseconds, where a task between others costs a hundred."""


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks that run as one.

    Args:
        tasks: their positions, in ascending order.
        again: those of them that an earlier group makes for all others.
    """

    tasks: Sequence[int]
    again: Set[int]


def grouped(plan: StepPlan, num_workers: int) -> list[TaskGroup]:
    """Groups of the tasks of a step, in an order that keeps all edges. But for what is made again each task is in one."""
    graph = _Groups(plan)
    waiting = set(graph.members)
    while waiting:
        each = min(waiting)
        waiting.discard(each)
        if each in graph.members:
            waiting |= graph.join_before(each, num_workers)
    for each in sorted(graph.members):
        if each in graph.members:
            graph.make_again(each, 2 * num_workers)
    return graph.in_order()


class _Groups:
    """Groups and the edges between them. A group has the number of its first member.

    Attributes:
        members: positions of the tasks of each group.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.members = {position: [position] for position in range(len(plan.tasks))}
        self._before = _direct(plan.predecessors)
        self._after: dict[int, set[int]] = {position: set() for position in self.members}
        for position, before in self._before.items():
            for each in before:
                self._after[each].add(position)
        self._data = {position: {handle for handle, _ in task.accesses} for position, task in enumerate(plan.tasks)}
        self._again: dict[int, set[int]] = {}

    def join_before(self, each: int, num_workers: int) -> Set[int]:
        """Join a group with those that lead to it alone, where a rule allows it. Returns the groups that another rule may now apply to."""
        before = self._before[each]
        if not before or any(self._after[other] != {each} for other in before):
            return set()
        joined = sorted(before)
        if len(before) > 1:
            common = self._before[joined[0]]
            if not common or any(self._before[other] != common for other in joined):
                return set()
            beside = sum(self._before[other] == common for other in self._after[min(common)])
            nbytes = self._nbytes([*joined, each])
            if nbytes > MOST_BYTES or (beside - len(joined) + 1 < num_workers and nbytes > FORK_BYTES):
                return set()
        joined.append(each)
        if not self._may_join(joined):
            return set()
        whole = self._join(joined)
        return {whole, *self._after[whole]}

    def _may_join(self, groups: Sequence[int]) -> bool:
        tasks = [self._plan.tasks[at] for group in groups for at in self.members[group]]
        alike = len({(task.kinds, task.priority) for task in tasks}) == 1 and all(map(_is_plain, tasks))
        return alike and len(tasks) <= MOST_TASKS

    def _nbytes(self, groups: Sequence[int]) -> int:
        """Bytes that some groups read and write."""
        return sum(handle.size for handle in set[HandleRecord]().union(*(self._data[group] for group in groups)))

    def make_again(self, each: int, most: int) -> None:
        """Put a cheap group into those behind it, if there are at most so many."""
        first, *others = sorted(self._after[each]) or [each]
        if not others or len(others) >= most or not self._is_cheap(each):
            return
        if not all(self._may_join([each, other]) for other in (first, *others)):
            return
        tasks, data, before = self.members[each], self._data[each], self._before[each]
        made = {handle for at in tasks for handle, mode in self._plan.tasks[at].accesses if mode == W}
        readers = {at for handle in made for at in self._plan.uses[handle].positions}
        for other in others:
            self.members[other] = sorted({*tasks, *self.members[other]})
            self._again.setdefault(other, set()).update(tasks)
            self._data[other] |= data
            self._after[each].discard(other)
            self._before[other].discard(each)
            self._link(before, other)
        whole = self._join([each, first])
        for other, members in self.members.items():  # the edges to others that read what is made led through those that make it themselves
            if other != whole and other not in others and not readers.isdisjoint(members):
                self._link({whole}, other)

    def _link(self, before: Set[int], after: int) -> None:
        for each in before:
            self._before[after].add(each)
            self._after[each].add(after)

    def _is_cheap(self, group: int) -> bool:
        """Whether a group may be made twice: it makes temporaries that nothing else writes, of little data that nothing overwrites."""
        tasks, uses = self.members[group], self._plan.uses
        if self._again.get(group) or len(tasks) > CHEAP_TASKS or sum(handle.size for handle in self._data[group]) > CHEAP_BYTES:
            return False
        for at in tasks:
            for handle, mode in self._plan.tasks[at].accesses:
                use = uses[handle]
                if mode == W:
                    is_pure = self._plan.owned.get(handle) is False and use.positions[0] == at == use.last_writer
                else:
                    is_pure = mode == SCRATCH or (mode == R and (use.last_writer is None or use.last_writer < at))
                if not is_pure:
                    return False
        return True

    def _join(self, groups: Sequence[int]) -> int:
        """Make one group of some between which no other group has to run. Returns its number."""
        whole, joined = min(groups), set(groups)
        again = [self._again.pop(each, set()) for each in groups]
        members = [set(self.members.pop(each)) for each in groups]
        own = set[int]().union(*(all_ - copied for all_, copied in zip(members, again, strict=True)))
        self.members[whole], self._again[whole] = sorted(own.union(*again)), set[int]().union(*again) - own
        self._data[whole] = set().union(*(self._data.pop(each) for each in groups))
        for edges, back in ((self._before, self._after), (self._after, self._before)):
            outside = set[int]().union(*(edges.pop(each) for each in groups)) - joined
            for other in outside:
                back[other] = (back[other] - joined) | {whole}
            edges[whole] = outside
        return whole

    def in_order(self) -> list[TaskGroup]:
        """All groups, one after those before it; of several the one that begins first."""
        missing = {each: len(before) for each, before in self._before.items()}
        ready = [each for each, count in missing.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            each = heapq.heappop(ready)
            found.append(TaskGroup(self.members[each], self._again.get(each, set())))
            for other in self._after[each]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, other)
        assert len(found) == len(self.members)
        return found


def _is_plain(task: RecordedTask) -> bool:
    """Whether any CPU worker may run the task."""
    return task.kinds[0] == "cpu" and task.pin is None and not task.aside


def _direct(predecessors: Sequence[Set[int]]) -> dict[int, set[int]]:
    """The predecessors of each task that are not before another one of them."""
    earlier: list[int] = []  # of each task a bit for each task that is before it
    found = {}
    for position, before in enumerate(predecessors):
        beyond = 0
        for each in before:
            beyond |= earlier[each]
        found[position] = {each for each in before if not beyond >> each & 1}
        for each in before:
            beyond |= 1 << each
        earlier.append(beyond)
    return found
