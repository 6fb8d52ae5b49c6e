"""Recomputation (rematerialisation): a recorded step rewritten so that some values are computed a second time instead of kept in memory.

- A *value* is the data of a handle after all its writers: one that overwrites it, then others that add to it, then only readers. Outputs, data that
  outlives the step, and data that is written after a read have no value here, so in-place updates are never cloned.
- The *production* of a value is its writers, with the writers of all else that these write. If the codelet of a sole writer has a tail
  (`core.codelet.Tail`) that computes the value from other results of the task, the tail alone is the production.
- The live range of the original ends before the widest gap between two uses. Clones of the production, entered before the first use after the gap,
  compute a copy for all later readers. If the original of one of their inputs is dead by then, that is recomputed first, or kept longer.

Nothing is cloned if its inputs have been overwritten since, or are inputs of the program, which may hold the next batch by then. Tasks are pure and
random numbers indexed by position, so results are bit-identical. The rewriting is deterministic and keeps the submission order.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from ..core.codelet import Codelet, Tail
from ..core.records import RW, SCRATCH, HandleId, HandleRecord, Mode, R, W
from ..core.step_plan import RecordedTask, StepPlan

NONE: Final = "none"
"""Value of `--recompute` that keeps all values."""
BLOCK: Final = "block"
"""Value of `--recompute` that keeps only the values that blocks of the model read from each other."""


@dataclass(frozen=True, slots=True)
class Production:
    """The tasks that compute a value and, together with it, other values, which share this object.

    Attributes:
        positions: positions of the tasks, or of the one whose tail is the production.
        tasks: the tasks themselves, or the tail as a task.
        inputs: handles that the tasks read, without those that they write.
        results: handles that the tasks write.
        overwritten: position of the first task after the first of `positions` that writes an input; the number of tasks of the step if none does.
    """

    positions: tuple[int, ...]
    tasks: list[RecordedTask]
    inputs: list[HandleRecord]
    results: list[HandleRecord]
    overwritten: int

    def is_repeatable(self, position: int) -> bool:
        """Whether the production ends before the task at `position`, and would read the same data again there."""
        return self.positions[-1] < position <= self.overwritten


@dataclass(frozen=True, slots=True)
class Value:
    """A value that can be recomputed.

    Attributes:
        handle: handle that holds it.
        production: tasks that recompute it.
        leaves: position of the last use before the gap.
        wanted: position of the first use after the gap.
    """

    handle: HandleRecord
    production: Production
    leaves: int
    wanted: int


class Values:
    """The values of a step in submission order.

    Args:
        plan: the step.

    Attributes:
        first_free_id: least id that is larger than those of all handles.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.first_free_id = 1 + max((handle.id for handle in plan.uses), default=-1)
        self._writers: dict[HandleRecord, list[int]] = {}
        self._whole: dict[HandleRecord, bool] = {}  # whether the data of a handle is a value
        self._values: dict[HandleRecord, Value | None] = {}
        self._productions: dict[HandleRecord, Production | None] = {}  # None for a value that must not be recomputed
        created = [0] * len(plan.tasks)
        for handle, use in plan.uses.items():
            writers = [position for position, mode in zip(use.positions, use.modes, strict=True) if mode == W or mode == RW]
            if writers:
                self._writers[handle] = writers
                first_read = use.modes.index(R) if R in use.modes else len(writers)
                is_own = plan.owned.get(handle) is False
                self._whole[handle] = is_own and use.modes[0] == W and use.modes.count(W) == 1 and first_read == len(writers)
                created[writers[0]] += handle.spec.size if handle in plan.owned else 0
        self._created = [0, *itertools.accumulate(created)]  # bytes of data that the tasks before each position create

    def of(self, handle: HandleRecord) -> Value | None:
        """Return the value of a handle; None if it cannot be recomputed."""
        if handle not in self._values:
            self._values[handle] = self._value(handle)
        return self._values[handle]

    def last_use(self, handle: HandleRecord) -> int:
        """Return the position of the last use of a handle; one past the last task if its data outlives the step."""
        return self.plan.uses[handle].positions[-1] if self.plan.owned.get(handle) is False else len(self.plan.tasks)

    def is_away_for(self, value: Value, times: int) -> bool:
        """Whether the step creates other data of at least `times` the value's size during its gap."""
        return self._created[value.wanted] - self._created[value.leaves + 1] >= times * value.handle.spec.size

    def last_writer(self, handle: HandleRecord) -> int:
        """Return the position of the last task that writes a handle."""
        return self._writers[handle][-1]

    def _value(self, handle: HandleRecord) -> Value | None:
        """Compute the value of a handle, for `of`."""
        if not self._whole.get(handle):
            return None
        uses, num_writers = self.plan.uses[handle].positions, len(self._writers[handle])
        if len(uses) == num_writers:
            return None
        after = max(range(num_writers, len(uses)), key=lambda index: uses[index] - uses[index - 1])  # the widest gap ends there
        last = self.plan.tasks[uses[num_writers - 1]]
        tail = last.codelet.tail if isinstance(last.codelet, Codelet) and num_writers == 1 and last.condition is None else None
        if tail is not None and handle in (last.accesses[index][0] for index in tail.writes):
            return Value(handle, self._of_tasks(uses[:1], [_tail_of(last, tail)]), uses[after - 1], uses[after])
        production = self._production(handle)
        if production is None or not production.is_repeatable(uses[after]):
            return None
        return Value(handle, production, uses[after - 1], uses[after])

    def _production(self, handle: HandleRecord) -> Production | None:
        """Return the production of all tasks that write the handle, or another one together with it; None if one of them must not be cloned."""
        if handle not in self._productions:
            positions, written = self._written_together(handle)
            tasks = [self.plan.tasks[position] for position in positions]
            is_pure = all(self._whole[other] for other in written) and all(self._may_be_cloned(task) for task in tasks)
            self._productions.update(dict.fromkeys(written, self._of_tasks(positions, tasks) if is_pure else None))
        return self._productions[handle]

    def _written_together(self, handle: HandleRecord) -> tuple[list[int], Set[HandleRecord]]:
        """Return the positions of the tasks that write the handle, or another one together with it, and all handles that they write."""
        positions: set[int] = set()
        written = {handle}
        pending = [handle]
        while pending:
            for position in self._writers[pending.pop()]:
                if position not in positions:
                    positions.add(position)
                    others = {other for other, mode in self.plan.tasks[position].accesses if mode not in (R, SCRATCH)} - written
                    written |= others
                    pending.extend(others)
        return sorted(positions), written

    def _may_be_cloned(self, task: RecordedTask) -> bool:
        """Return whether a task reads no input of the program, and waits for nothing outside the step."""
        reads = (handle for handle, mode in task.accesses if mode == R)
        return task.kinds[0] != "host" and all(handle.spec.kind != "input" or handle in self.plan.owned for handle in reads)

    def _of_tasks(self, positions: Sequence[int], tasks: list[RecordedTask]) -> Production:
        """Return the production that consists of the given tasks."""
        results = dict.fromkeys(handle for task in tasks for handle, mode in task.accesses if mode == W)
        inputs = dict.fromkeys(handle for task in tasks for handle, mode in task.accesses if mode == R and handle not in results)
        overwritten = min((self._next_write(handle, positions[0]) for handle in inputs), default=len(self.plan.tasks))
        return Production(tuple(positions), tasks, [*inputs], [*results], overwritten)

    def _next_write(self, handle: HandleRecord, position: int) -> int:
        """Return the position of the first task after `position` that writes a handle; the number of tasks if none does."""
        writers = self._writers.get(handle, [])
        index = bisect_right(writers, position)
        return writers[index] if index < len(writers) else len(self.plan.tasks)


def _tail_of(task: RecordedTask, tail: Tail) -> RecordedTask:
    """Return the tail of a task as a task of its own, over the same handles."""
    modes: dict[int, Mode] = {**dict.fromkeys(tail.reads, R), **dict.fromkeys(tail.writes, W)}
    accesses = tuple((task.accesses[index][0], mode) for index, mode in modes.items())
    constants = {name: task.constants[name] for name in tail.constants}
    return RecordedTask(tail.codelet, tail.codelet.name, task.kinds, accesses, constants, task.priority, task.pin)


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """Values of one kind: results of one operation of one module, in all layers and minibatches.

    Attributes:
        op: operation that computes them.
        name: name in `--recompute`: path of the module, with "*" for numbers of layers, and if need be with the operation and the number of the
            result.
        layers: handles of the values of each layer, in all minibatches; layers with the widest gaps come first.
        nbytes: bytes of all values together.
        seconds: duration of the recomputation of all of them, if all else is kept; 0 if unknown.
    """

    op: str
    name: str
    layers: tuple[tuple[HandleRecord, ...], ...]
    nbytes: int
    seconds: float = 0.0

    def leading(self, share: float) -> list[HandleRecord]:
        """Return the handles of the first layers, up to a fraction `share` of all layers."""
        return [handle for layer in self.layers[: ceil(share * len(self.layers))] for handle in layer]

    @property
    def middle(self) -> HandleRecord:
        """Handle of a representative value, from the middle layer."""
        return self.layers[len(self.layers) // 2][0]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Selection of the values that a step recomputes.

    Attributes:
        name: value of `--recompute` that selects them.
        handles: their handles.
        lasting: handles that are never recomputed with them, but kept longer if a clone reads them, because blocks read them from each other.
        groups: groups of values that a planner chooses from, the cheapest first; empty if none has.
        seconds_without: forecast seconds of the step without recomputation; infinite if its data does not fit the machine, None if unknown.
    """

    name: str = NONE
    handles: Set[HandleRecord] = frozenset()
    lasting: Set[HandleRecord] = frozenset()
    groups: Sequence[ValueGroup] = ()
    seconds_without: float | None = None

    def apply(self, values: Values) -> StepPlan:
        """Return the step in submission order with the selected values recomputed; handles without a value are kept."""
        return _Rewriting(values, self.handles, self.lasting).run()


def clones_of(values: Values, handle: HandleRecord, others: Set[HandleRecord]) -> tuple[list[RecordedTask], Set[HandleRecord]]:
    """Return the tasks that recompute one value for its first use after the gap, and the handles whose values they compute.

    Args:
        values: values of the step.
        handle: handle of the value.
        others: handles of all values that are recomputed, hence not kept for these tasks.
    """
    return _Rewriting(values, others, frozenset()).only(handle)


class _Rewriting:
    """One pass over a step that enters clones; arguments as in `Recomputation`."""

    def __init__(self, values: Values, handles: Set[HandleRecord], lasting: Set[HandleRecord]) -> None:
        self._plan, self._values, self._lasting = values.plan, values, lasting
        self._chosen = handles
        self._copies: dict[HandleRecord, HandleRecord] = {}  # original -> handle of the recomputed value
        self._ids = itertools.count(values.first_free_id)
        self._owned: dict[HandleRecord, bool] = {}
        self._tasks: list[RecordedTask] = []

    def run(self) -> StepPlan:
        """Return the new step."""
        for position, task in enumerate(self._plan.tasks):
            dead = [handle for handle, mode in task.accesses if mode == R and handle in self._chosen and not self._is_live(handle, position)]
            for handle in dead:
                self._recompute(handle, position)
            if any(handle in self._copies for handle in dead):
                accesses = tuple((self._operand(handle, position) if mode == R else handle, mode) for handle, mode in task.accesses)
                task = replace(task, accesses=accesses)
            self._tasks.append(task)
        return StepPlan(self._tasks, {**self._plan.owned, **self._owned}, window=self._plan.window, idle=self._plan.idle)

    def only(self, handle: HandleRecord) -> tuple[list[RecordedTask], Set[HandleRecord]]:
        """Return the clones for one value alone, and the handles whose values they compute."""
        value = self._values.of(handle)
        assert value is not None  # as the caller knows
        self._recompute(handle, value.wanted)
        return self._tasks, self._copies.keys()

    def _is_live(self, handle: HandleRecord, position: int) -> bool:
        """Whether the original of a handle is live at a position."""
        value = self._values.of(handle) if handle in self._chosen else None
        return position <= value.leaves if value is not None else position <= self._values.last_use(handle)

    def _operand(self, handle: HandleRecord, position: int) -> HandleRecord:
        """Return the handle that a task at a position reads in place of `handle`: the original while it is live or has no copy."""
        return handle if self._is_live(handle, position) else self._copies.get(handle, handle)

    def _recompute(self, handle: HandleRecord, position: int) -> None:
        """Enter clones until a task at a position can read the value of a handle."""
        stack = [handle]
        while stack:
            wanted = stack[-1]
            value = self._missing(wanted, position)
            inputs = [] if value is None else value.production.inputs
            missing = [each for each in inputs if self._missing(each, position) is not None]
            stack.extend(reversed(missing))
            if not missing:
                stack.pop()
                if value is not None:
                    self._clone(value, position)

    def _missing(self, handle: HandleRecord, position: int) -> Value | None:
        """Return the value to recompute before a task at a position can read the handle; None if it is live, has a copy, or is kept longer."""
        if handle in self._copies or handle in self._lasting or self._is_live(handle, position):
            return None
        value = self._values.of(handle)
        return value if value is not None and value.production.is_repeatable(position) else None

    def _clone(self, value: Value, position: int) -> None:
        """Enter clones of the production of a value before the task at a position, which could read all its inputs."""
        copies = {handle: self._copy_of(handle) for handle in value.production.results}
        label = self._plan.tasks[position].label._replace(block=None)
        for task in value.production.tasks:
            accesses = tuple(
                (copies.get(handle) or (self._operand(handle, position) if mode == R else handle), mode) for handle, mode in task.accesses
            )
            self._tasks.append(replace(task, accesses=accesses, label=label, num_clones=1, clone_share=1.0))
        self._copies.update(copies)

    def _copy_of(self, handle: HandleRecord) -> HandleRecord:
        """Return a new handle of the step for the recomputed value of another one."""
        copy = HandleRecord(HandleId(next(self._ids)), handle.spec)
        self._owned[copy] = False
        return copy
