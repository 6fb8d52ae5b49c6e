"""Recorded steps: tasks captured once, planned once, replayed many times.

A recording is a list of tasks over handle records. Handles created while recording belong to the step: each of its two instances has its own copies
of them, so that two replays can be in progress without sharing temporaries. All other handles are shared with the rest of the program. A replay
waits for the last access of each shared handle, not for the end of the previous replay. This module is pure: building a plan and an instance runs
nothing and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from .records import (
    ANY,
    FILE,
    RW,
    HandleRecord,
    Mode,
    NodeId,
    R,
    Replay,
    ReplayPlan,
    SharedUse,
    Task,
    TaskId,
    TaskSpec,
    UseSchedule,
    W,
)

Phase = Literal["forward", "backward", "update"]

Clone = Callable[[HandleRecord], HandleRecord]
"""Function that creates a record with the properties of another one, without replicas."""


class Label(NamedTuple):
    """Place of a task in the program that recorded it, as the program declares it (`scheduler.api.labels`).

    Attributes:
        phase: phase of a training step.
        minibatch: number of backward passes that the program had ended before; -1 for tasks of the recorder itself.
        path: dotted path of the module, such as "h.3.mlp.c_fc"; "" outside all modules.
        block: number of the block of a model that it belongs to (`TaskRuntime.block`); None outside all blocks.
    """

    phase: Phase = "forward"
    minibatch: int = -1
    path: str = ""
    block: int | None = None


NO_LABEL = Label()


@dataclass(slots=True, eq=False)
class RecordedTask(TaskSpec):
    """One captured task.

    Attributes:
        label: place of the task in the program.
    """

    label: Label = NO_LABEL


@dataclass(slots=True)
class _Use:
    """The uses of one handle in the step, by positions in the recorded order."""

    first_readers: list[int] = field(default_factory=list)
    first_writer: int | None = None
    last_writer: int | None = None
    readers: list[int] = field(default_factory=list)  # since the last writer
    positions: list[int] = field(default_factory=list)
    modes: list[Mode] = field(default_factory=list)  # of `positions`
    leaves: Set[int] = frozenset()  # of `positions`
    num_uses: int = 0
    num_conditional: int = 0
    needs_data: bool = False


class StepPlan:
    """The dependency graph and lifetimes of a recording.

    Args:
        tasks: the tasks in recorded order.
        owned: handles created while recording; True for outputs, which outlive the replay, False for those that die at their last use.
        window: distance from the oldest unfinished task at which tasks are held back.
        partitions: partition of each task, from 0, or -1; the tasks of a partition run on one device. Empty without partitions.
        idle: bytes of the program's data that exist while the step runs and that none of its tasks uses, if known.

    Attributes:
        aside: for each task, whether it runs in host memory while devices run the others (`RecordedTask.aside`).
    """

    def __init__(
        self, tasks: Sequence[RecordedTask], owned: Mapping[HandleRecord, bool], *, window: int = ANY, partitions: Sequence[int] = (), idle: int = 0
    ) -> None:
        self.tasks = list(tasks)
        self.aside = [task.aside for task in self.tasks]
        self.has_aside = any(self.aside)
        self.window = window
        self.partitions = list(partitions)
        self.idle = idle
        self.returns: Sequence[Sequence[tuple[int, int]]] = ()
        self._replay_plans: dict[bool, ReplayPlan] = {}  # of the present partitions and returns, by `computes_on_last` of `instantiate`
        self.owned = dict(owned)
        self.predecessors: list[set[int]] = []
        self.successors: list[list[int]] = [[] for _ in self.tasks]
        self.uses: dict[HandleRecord, _Use] = {}
        for position, task in enumerate(self.tasks):
            waits: set[int] = set()
            for handle, mode in task.accesses:
                use = self.uses.get(handle)
                if use is None:
                    use = self.uses[handle] = _Use()
                self._enter(use, position, mode, waits)
                use.num_conditional += task.condition is not None and task.condition.guard >= 0
            self.predecessors.append(waits)
            for before in sorted(waits):
                self.successors[before].append(position)
        mortal = ((handle.spec.size, use) for handle, use in self.uses.items() if self.owned.get(handle) is False)
        # (bytes, positions of the uses) of data that is created and dies within a replay, except scratch
        self._temporaries = [(size, use.positions) for size, use in mortal if use.first_writer is not None]

    @staticmethod
    def _enter(use: _Use, position: int, mode: Mode, waits: set[int]) -> None:
        """Add one access and collect the tasks that it waits for; the same rule as `dependencies.link`."""
        if use.first_writer is None and not use.readers and (mode == R or mode == RW):
            use.needs_data = True
        use.num_uses += 1
        use.positions.append(position)
        use.modes.append(mode)
        if mode == R:
            if use.last_writer is not None:
                waits.add(use.last_writer)
            elif use.first_writer is None:
                use.first_readers.append(position)
            use.readers.append(position)
        elif mode == W or mode == RW:
            waits.update(use.readers)
            if use.last_writer is not None and not use.readers:
                waits.add(use.last_writer)
            use.readers = []
            use.last_writer = position
            if use.first_writer is None:
                use.first_writer = position

    @property
    def turns(self) -> list[int]:
        """Positions of the tasks of kind host, which planned orders leave in their order of submission."""
        return [position for position, task in enumerate(self.tasks) if task.kinds[0] == "host"]

    def divided(self, partitions: Sequence[int]) -> StepPlan:
        """Return the same step with partitions; everything else is shared with this plan."""
        plan = copy(self)
        plan.partitions = list(partitions)
        plan._replay_plans = {}
        return plan

    def foresee(self, leaves: Mapping[HandleRecord, Set[int]], returns: Sequence[Sequence[tuple[int, int]]] = ()) -> None:
        """Note the uses before which handles are expected to leave the memory where tasks run, for instances created later.

        Args:
            leaves: `UseSchedule.leaves` of each handle that leaves at all.
            returns: `ReplayPlan.returns` of these instances.
        """
        self.returns = [list(partition) for partition in returns]
        self._replay_plans.clear()
        for handle, positions in leaves.items():
            self.uses[handle].leaves = positions

    def unwritten(self) -> list[tuple[RecordedTask, HandleRecord]]:
        """Return the owned handles whose first access reads them, each with the task that does."""
        reads = []
        seen: set[HandleRecord] = set()
        for task in self.tasks:
            for handle, mode in task.accesses:
                if handle not in seen and handle in self.owned and (mode == R or mode == RW):
                    reads.append((task, handle))
                seen.add(handle)
        return reads

    def is_only_aside(self, handle: HandleRecord) -> bool:
        """Return whether only tasks that run aside use the handle."""
        return self.has_aside and all(self.aside[position] for position in self.uses[handle].positions)

    def live_bytes(self) -> list[int]:
        """Return, for each position in the planned order, the bytes of the step's own data that must exist while its task runs.

        Scratch is included; data that only tasks aside use is not. Data that outlives the step counts from its first write, if no read precedes it.
        """
        change = [0] * (len(self.tasks) + 1)
        for handle, use in self.uses.items():
            if self.is_only_aside(handle):
                continue
            if use.first_writer is None and not use.readers:  # scratch
                for position in use.positions:
                    change[position] += handle.spec.size
                    change[position + 1] -= handle.spec.size
            elif not use.needs_data:
                change[use.positions[0]] += handle.spec.size
                if self.owned.get(handle) is False:
                    change[use.positions[-1] + 1] -= handle.spec.size
        return list(accumulate(change[:-1]))

    def needed_bytes(self) -> int:
        """Return the largest number of bytes that exist at once, if tasks run one at a time in this order.

        They are the inputs, results and scratch of the step, without data that only tasks aside use.
        """
        inputs = sum(
            handle.spec.size for handle, use in self.uses.items() if use.needs_data and handle not in self.owned and not self.is_only_aside(handle)
        )
        return inputs + max(self.live_bytes(), default=0)

    def minimum_bytes(self, *, is_last: bool, computes: bool, replays: int = 2, ranks: Sequence[int] | None = None) -> int:
        """Return the smallest budget of a memory with which every task of the step can run in any order of completions; plans refuse a smaller one.

        A memory with a tier below it must hold the largest working set of a task. If no task runs there, it must hold the largest tile, which the
        program may acquire. The last tier must hold everything that exists at once in the planned order with one task at a time: all data that
        outlives the step, one instance of the outputs per replay in progress, and the largest sum of temporaries (including copies of inputs) and, if
        tasks run there, scratch. The temporaries of the second replay add nothing: tasks ahead of the planned order only get bytes that the rest of
        the order does not need. Data in a file that is only read counts like scratch, since it can be read again. Of the data that the step does not
        use, `idle` counts.

        Args:
            is_last: whether no tier lies below this memory.
            computes: whether tasks run on data in this memory.
            replays: number of replays that will ever run; with one, the outputs have one instance.
            ranks: position of each task in another order, if they run in that one.
        """
        if not is_last:
            return self.largest_task() if computes else max((handle.spec.size for handle in self.uses if not self._is_scratch(handle)), default=0)
        outlives = (handle for handle in self.uses if handle not in self.owned and not self._is_scratch(handle))
        outliving = self.idle + sum(handle.spec.size for handle in outlives if not self.stays_in_file(handle))
        outputs = sum(handle.spec.size for handle in self.uses if self.owned.get(handle) is True)
        passing = max(self.temporary_bytes(scratch=computes, ranks=ranks), default=0)
        borrowed = max((handle.spec.size for handle in self.uses if self.stays_in_file(handle)), default=0)  # the program may acquire any of them
        return outliving + min(replays, 2) * outputs + max(passing, borrowed)

    def stays_in_file(self, handle: HandleRecord) -> bool:
        """Return whether the handle's data lies in a file and the step only reads it."""
        return FILE in handle.replicas and self.uses[handle].first_writer is None

    def temporary_bytes(self, *, scratch: bool, ranks: Sequence[int] | None = None) -> list[int]:
        """Return, for each position in the planned order, the bytes of data that is created and dies within a replay while its task runs.

        Args:
            scratch: whether tasks run here, and need bytes for scratch and for data that they read from files; tasks that run aside always do.
            ranks: position of each task in another order, if they run in that one.
        """
        change = [0] * (len(self.tasks) + 1)
        for size, positions in self._temporaries:
            if ranks is None:
                first, last = positions[0], positions[-1]
            else:
                reordered = [ranks[position] for position in positions]
                first, last = min(reordered), max(reordered)
            change[first] += size
            change[last + 1] -= size
        for handle, use in self.uses.items() if scratch or self.has_aside else ():
            if use.first_writer is None and (not use.readers or FILE in handle.replicas):  # scratch, or data that stays in its file
                for position in use.positions:
                    if scratch or self.aside[position]:
                        rank = position if ranks is None else ranks[position]
                        change[rank] += handle.spec.size
                        change[rank + 1] -= handle.spec.size
        return list(accumulate(change[:-1]))

    def _is_scratch(self, handle: HandleRecord) -> bool:
        use = self.uses[handle]
        return use.first_writer is None and not use.readers

    def largest_task(self, *, aside: bool = False) -> int:
        """Return the bytes that the task with the largest working set uses: the smallest size of a memory where tasks run.

        Args:
            aside: whether to look at the tasks that only host memory must hold: those that run aside, and those of kind host.
        """
        tasks = [task for task, is_aside in zip(self.tasks, self.aside, strict=True) if is_aside == aside or (aside and task.kinds[0] == "host")]
        return max((sum(handle.spec.size for handle, _ in task.accesses) for task in tasks), default=0)

    def _replay_plan(self, *, computes_on_last: bool) -> ReplayPlan:
        """Return the facts that all instances on machines of this kind share."""
        known = self._replay_plans.get(computes_on_last)
        if known is None:
            passing = self.temporary_bytes(scratch=computes_on_last)
            known = self._replay_plans[computes_on_last] = ReplayPlan(
                makes=self._makes(),
                passing=passing,
                peaks=[*accumulate(reversed(passing), max, initial=0)][::-1],
                window=self.window,
                partitions=positions_by_partition(self.partitions),
                returns=self.returns,
                has_pins=any(task.pin is not None for task in self.tasks),
                has_aside=self.has_aside,
            )
        return known

    def _makes(self) -> list[int]:
        """Return `ReplayPlan.makes` of the step's replays."""
        makes = [0] * len(self.tasks)
        for size, positions in self._temporaries:
            makes[positions[0]] += size
        return makes

    def instantiate(
        self, clone: Clone, first_id: int, *, computes_on_last: bool = True, bound: Mapping[HandleRecord, HandleRecord] | None = None
    ) -> tuple[Replay, dict[HandleRecord, HandleRecord]]:
        """Create the tasks and own handles of one instance.

        Args:
            clone: function that creates records.
            first_id: id of the first task.
            computes_on_last: whether tasks run on data in the last tier, which then also holds their scratch.
            bound: the program's record of each symbolic one; None if the plan has the program's own.

        Returns:
            The replay, and the instance's record of each owned handle.
        """
        twins = {handle: clone(handle) for handle in self.owned if handle in self.uses}
        for handle, twin in twins.items():
            twin.released = not self.owned[handle]
        records = {**(bound or {}), **twins}
        dying = [(twin, self.uses[handle].num_uses) for handle, twin in twins.items() if twin.released]
        replay = Replay(self._replay_plan(computes_on_last=computes_on_last), [], [], dying, [])
        replay.tasks += [self._twin_task(position, records, first_id, replay) for position in range(len(self.tasks))]
        replay.roots += [task for task in replay.tasks if not task.num_predecessors]
        replay.turns = [replay.tasks[position] for position in self.turns]
        for task, successors in zip(replay.tasks, self.successors, strict=True):
            task.successors = [replay.tasks[after] for after in successors]
        for handle, use in self.uses.items():
            record = records.get(handle, handle)
            if record.released:
                record.use_schedule = UseSchedule(use.positions, use.modes, use.leaves, replay, use.num_conditional == use.num_uses)
            if handle not in twins or not record.released:
                replay.shared.append(self._share(record, use, replay))
        for shared in replay.shared:
            for task in (*shared.last_readers, *([shared.last_writer] if shared.last_writer else [])):
                task.is_exit = True
        return replay, twins

    def _twin_task(self, position: int, records: Mapping[HandleRecord, HandleRecord], first_id: int, replay: Replay) -> Task:
        recorded = self.tasks[position]
        number = len(self.predecessors[position])
        return Task(
            TaskId(first_id + position),
            recorded,
            tuple((records.get(handle, handle), mode) for handle, mode in recorded.accesses),
            num_waiting=number,
            num_predecessors=number,
            step=replay,
            position=position,
            partition=self.partitions[position] if self.partitions else -1,
            is_exit=False,
        )

    @staticmethod
    def _share(handle: HandleRecord, use: _Use, replay: Replay) -> SharedUse:
        tasks = replay.tasks
        return SharedUse(
            handle,
            [tasks[position] for position in use.first_readers],
            None if use.first_writer is None else tasks[use.first_writer],
            None if use.last_writer is None else tasks[use.last_writer],
            [tasks[position] for position in use.readers],
            use.num_uses,
            use.needs_data,
            UseSchedule(use.positions, use.modes, use.leaves, is_conditional=use.num_conditional == use.num_uses),
        )


def positions_by_partition(partitions: Sequence[int]) -> list[list[int]]:
    """Return the positions of the tasks of each partition, given the partition of each task."""
    positions: list[list[int]] = [[] for _ in range(max(partitions, default=-1) + 1)]
    for position, partition in enumerate(partitions):
        if partition >= 0:
            positions[partition].append(position)
    return positions


def begin_replay(replay: Replay, nodes: Sequence[NodeId]) -> None:
    """Reset an instance of a step for its next replay; `nodes` run its partitions, one each, unless the numbers differ."""
    replay.failure = None
    replay.num_unfinished = len(replay.tasks)
    replay.done = bytearray(len(replay.tasks))
    replay.pending = bytearray(b"\1") * len(replay.tasks)
    replay.pending_seconds = sum(task.spec.shared_seconds for task in replay.tasks)
    replay.frontier = 0
    replay.partition_nodes = nodes if len(nodes) == len(replay.plan.partitions) else ()
    replay.heads = [0] * len(replay.partition_nodes)
    replay.returned = [0] * len(replay.plan.returns)
