"""Values of a recorded step that are made again instead of kept: a step turned into one that computes more and holds less.

Theory of operation. A task is a pure function of what it reads, so a value whose inputs are still to be had, or can be made again themselves, may be
made again just before its next use: clones of the tasks that made it, over new handles. Random numbers are indexed by position, so the bits stay.

- A *value* is what a handle of the step holds once its writers have ended: one that overwrites it, then others that add to it, then readers. A handle
  that is written after it has been read has no value here, nor has an output or data that outlives the step: in-place updates are never cloned.
- The *production* of a value is the tasks that write it, and those that write with them what they write as well. If the codelet of its writer has a
  tail (`core.codelet.Tail`) that makes the value from the other results of the task, the tail alone is the production.
- The widest stretch between two uses of a value is where it is *away*: readers before it have the original, those behind it the new one.
- A production reads a value that is away, or dead by then, from a clone too, which is made first; what cannot be made again is kept for longer.

Nothing is cloned whose inputs have been overwritten in between, and no copy of a program's input, which may hold the next batch by then.

Rules: pure and deterministic. Clones stand where they are wanted in submission order, so edges and lifetimes of the new step follow as those of any
other do, and orders sort clones with the tasks that want them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from ..core.codelet import Codelet, Tail
from ..core.records import RW, SCRATCH, HandleId, HandleRecord, Mode, R, W
from ..core.step_plan import RecordedTask, StepPlan

NONE: Final = "none"
BLOCK: Final = "block"


@dataclass(frozen=True, slots=True)
class Value:
    """A value that can be made again.

    Attributes:
        handle: that holds it.
        production: positions of the tasks that make it again, or of the one whose tail does.
        tail: of that task, where it is enough; None where whole tasks are cloned.
        leaves: position of the last use before it is away.
        wanted: position of the first use after it.
    """

    handle: HandleRecord
    production: tuple[int, ...]
    tail: Tail | None
    leaves: int
    wanted: int


class Values:
    """The values of a step in submission order.

    Args:
        plan: the step.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._writers: dict[HandleRecord, list[int]] = {}
        self._whole: dict[HandleRecord, bool] = {}
        for handle, use in plan.uses.items():
            written = [at for at, mode in zip(use.positions, use.modes, strict=True) if mode == W or mode == RW]
            if written:
                self._writers[handle] = written
                reads = [at for at, mode in zip(use.positions, use.modes, strict=True) if mode == R]
                is_own = plan.owned.get(handle) is False
                first = use.modes[0] == W and use.modes.count(W) == 1
                self._whole[handle] = is_own and first and (not reads or reads[0] > written[-1])
        self._found: dict[HandleRecord, Value | None] = {}
        made = [0] * len(plan.tasks)
        for handle, written in self._writers.items():
            made[written[0]] += handle.size if handle in plan.owned else 0
        self._made = [0, *itertools.accumulate(made)]

    def of(self, handle: HandleRecord) -> Value | None:
        """The value of a handle; None where it cannot be made again."""
        if handle not in self._found:
            self._found[handle] = self._value(handle)
        return self._found[handle]

    def last_use(self, handle: HandleRecord) -> int:
        """Position of the last use; that of no task for data that outlives the step."""
        return self.plan.uses[handle].positions[-1] if self.plan.owned.get(handle) is False else len(self.plan.tasks)

    def is_away_for(self, value: Value, times: int) -> bool:
        """Whether the step makes other data of so many times the value's size while it is away."""
        return self._made[value.wanted] - self._made[value.leaves + 1] >= times * value.handle.size

    def last_writer(self, handle: HandleRecord) -> int:
        """Position of the last task that writes a value."""
        return self._writers[handle][-1]

    def inputs(self, value: Value) -> list[HandleRecord]:
        """What the production reads beside what it makes."""
        if value.tail is not None:
            return self._results(value, value.tail.reads)
        tasks = [self.plan.tasks[at] for at in value.production]
        made = {handle for task in tasks for handle, mode in task.accesses if mode == W}
        return [*dict.fromkeys(handle for task in tasks for handle, mode in task.accesses if mode == R and handle not in made)]

    def made(self, value: Value) -> list[HandleRecord]:
        """What the production makes."""
        if value.tail is not None:
            return self._results(value, value.tail.writes)
        return [handle for at in value.production for handle, mode in self.plan.tasks[at].accesses if mode == W]

    def tasks(self, value: Value) -> list[RecordedTask]:
        """The tasks of the production, over the handles of the step."""
        tasks, tail = [self.plan.tasks[at] for at in value.production], value.tail
        if tail is None:
            return tasks
        (task,) = tasks
        accesses: list[tuple[HandleRecord, Mode]] = [(task.accesses[each][0], R) for each in tail.reads]
        accesses += [(task.accesses[each][0], W) for each in tail.writes]
        constants = {name: task.constants[name] for name in tail.constants}
        return [RecordedTask(tail.codelet, tail.codelet.name, task.kinds, tuple(accesses), constants, task.priority, task.pin)]

    def _results(self, value: Value, accesses: Iterable[int]) -> list[HandleRecord]:
        """Handles of some accesses of the task whose tail makes a value."""
        return [self.plan.tasks[value.production[0]].accesses[at][0] for at in accesses]

    def is_unchanged(self, value: Value, at: int) -> bool:
        """Whether the production has ended before the task at a position, and everything that it reads still is what it was."""
        if value.production[-1] >= at:
            return False
        for handle in self.inputs(value):
            written = self._writers.get(handle, ())
            if written and bisect_right(written, value.production[0]) != bisect_right(written, at - 1):
                return False
        return True

    def _value(self, handle: HandleRecord) -> Value | None:
        if not self._whole.get(handle):
            return None
        uses = self.plan.uses[handle].positions
        written = self._writers[handle]
        last = len(written) - 1
        widths = [uses[at + 1] - uses[at] for at in range(last, len(uses) - 1)]
        if not widths:
            return None
        at = last + max(range(len(widths)), key=widths.__getitem__)
        leaves, wanted = uses[at], uses[at + 1]
        task = self.plan.tasks[written[-1]]
        tail = task.codelet.tail if isinstance(task.codelet, Codelet) else None
        if tail is not None and len(written) == 1 and handle in (task.accesses[each][0] for each in tail.writes):
            return Value(handle, (written[-1],), tail, leaves, wanted)
        production = self._production(handle)
        if production is None:
            return None
        value = Value(handle, production, None, leaves, wanted)
        return value if self.is_unchanged(value, wanted) else None

    def _production(self, handle: HandleRecord) -> tuple[int, ...] | None:
        """Positions of all tasks that write the handle or, with it, another one; None where one of them may not be cloned."""
        found: set[int] = set()
        seen = {handle}
        wanted = [handle]
        while wanted:
            for at in self._writers[wanted.pop()]:
                if at in found:
                    continue
                found.add(at)
                task = self.plan.tasks[at]
                if task.kinds[0] == "host":
                    return None
                for other, mode in task.accesses:
                    if mode == R:
                        if other.kind == "input" and other not in self.plan.owned:
                            return None
                    elif mode != SCRATCH and other not in seen:
                        if not self._whole.get(other):
                            return None
                        seen.add(other)
                        wanted.append(other)
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """Values of one kind: made by one operation and read by the same ones, in all layers and minibatches.

    Attributes:
        op: the operation that makes them.
        name: by which it can be asked for: the operation, which of its results they are if several are away, and the readers if that is not enough.
        layers: their handles, by places of the program, which all minibatches pass; those that are away longest come first.
        nbytes: of all of them together.
        seconds: to make all of them again, where everything else is kept; 0 if that is not known.
    """

    op: str
    name: str
    layers: tuple[tuple[HandleRecord, ...], ...]
    nbytes: int
    seconds: float = 0.0

    def leading(self, share: float) -> list[HandleRecord]:
        """The handles of the leading share of the layers."""
        return [handle for layer in self.layers[: ceil(share * len(self.layers))] for handle in layer]

    def num_blocks(self, plan: StepPlan) -> int:
        """Number of blocks of a model that make such values, in each minibatch; 0 for values outside blocks."""
        blocks = [{plan.tasks[plan.uses[handle].positions[0]].block for handle in handles} - {None} for handles in self.layers]
        return len(set().union(*blocks)) // max(1, *map(len, blocks))

    @property
    def middle(self) -> HandleRecord:
        """One that stands for all."""
        return self.layers[len(self.layers) // 2][0]


@dataclass(frozen=True, slots=True)
class Mix:
    """What a planner chose to make again.

    Attributes:
        groups: all of the step, the cheapest first; K of them are made again.
        num_groups: K.
        share: of the values of the last one.
        inside: instead of groups, values that were asked for: those that nothing outside their block reads, or what operations make; empty where
            groups were chosen.
        between: what blocks read from each other, which is kept then.
        asked: what `inside` was asked for by.
        seconds_without: forecast of the step that makes nothing again; infinite where the machine cannot hold that one's data, None if not known.
    """

    groups: Sequence[ValueGroup] = ()
    num_groups: int = 0
    share: float = 1.0
    inside: Set[HandleRecord] = frozenset()
    between: Set[HandleRecord] = frozenset()
    asked: str = BLOCK
    seconds_without: float | None = None

    def again(self, group: ValueGroup) -> list[HandleRecord]:
        """Those of a group's values that are made again."""
        if self.inside:
            return [handle for handle in group.leading(1.0) if handle in self.inside]
        chosen = self.groups[: self.num_groups]
        return group.leading(self.share if group is chosen[-1] else 1.0) if group in chosen else []

    def apply(self, values: Values) -> StepPlan:
        """The step that makes these again."""
        return recomputed(values, self.inside or [handle for group in self.groups for handle in self.again(group)], self.between)

    @property
    def name(self) -> str:
        """By which it can be asked for."""
        if self.inside:
            return self.asked
        share = "" if self.share == 1 else f":{self.share:g}"
        return ",".join(group.name for group in self.groups[: self.num_groups]) + share or NONE


def recomputed(values: Values, again: Iterable[HandleRecord], kept: Set[HandleRecord] = frozenset()) -> StepPlan:
    """The step in submission order with some values made again.

    Args:
        values: of the step.
        again: handles of the values to make again; those that have none are kept.
        kept: what is never made again, and rather kept for longer where a clone reads it.
    """
    return _Rewriting(values, again, kept).run()


def clones_of(values: Values, handle: HandleRecord, again: Iterable[HandleRecord] = ()) -> tuple[list[RecordedTask], Set[HandleRecord]]:
    """The tasks that make a value again where it is wanted first, and the handles whose values they make.

    Args:
        again: handles of other values that are not kept either.
    """
    return _Rewriting(values, [handle, *again], frozenset()).only(handle)


class _Rewriting:
    """One pass over a step that enters clones.

    Args:
        again, kept: as of `recomputed`.
    """

    def __init__(self, values: Values, again: Iterable[HandleRecord], kept: Set[HandleRecord]) -> None:
        plan = values.plan
        self._plan, self._values, self._kept = plan, values, kept
        self._away = {handle: found for handle in again if (found := values.of(handle)) is not None}
        self._made: dict[HandleRecord, HandleRecord] = {}
        self._ids = itertools.count(1 + max((handle.id for handle in plan.uses), default=-1))
        self._owned = dict(plan.owned)
        self._tasks: list[RecordedTask] = []

    def run(self) -> StepPlan:
        """The new step."""
        for at, task in enumerate(self._plan.tasks):
            reads = [handle for handle, mode in task.accesses if mode == R]
            for handle in reads:
                self._bring(handle, at)
            if any(self._now(handle, at) is not handle for handle in reads):
                task = replace(task, accesses=tuple((self._now(handle, at) if mode == R else handle, mode) for handle, mode in task.accesses))
            self._tasks.append(task)
        return StepPlan(self._tasks, self._owned, window=self._plan.window, idle=self._plan.idle)

    def only(self, handle: HandleRecord) -> tuple[list[RecordedTask], Set[HandleRecord]]:
        """The clones for one value alone, and what they make."""
        self._bring(handle, self._away[handle].wanted)
        return self._tasks, self._made.keys()

    def _is_there(self, handle: HandleRecord, at: int) -> bool:
        """Whether the original of a handle is there when the task at a position runs."""
        value = self._away.get(handle)
        return at <= value.leaves if value is not None else at <= self._values.last_use(handle)

    def _now(self, handle: HandleRecord, at: int) -> HandleRecord:
        return handle if self._is_there(handle, at) else self._made.get(handle, handle)

    def _bring(self, handle: HandleRecord, at: int) -> None:
        """Enter clones until a value is there for a clone or the task at a position."""
        stack = [handle]
        while stack:
            wanted = stack[-1]
            value = self._missing(wanted, at)
            missing = [] if value is None else [each for each in self._values.inputs(value) if self._missing(each, at) is not None]
            stack.extend(reversed(missing))
            if not missing:
                stack.pop()
                if value is not None:
                    self._enter(value, at)

    def _missing(self, handle: HandleRecord, at: int) -> Value | None:
        """The value to make again before a task at a position can read the handle; None where it can, or what it reads is kept for longer."""
        if handle in self._made or handle in self._kept or self._is_there(handle, at):
            return None
        value = self._values.of(handle)
        return value if value is not None and self._values.is_unchanged(value, at) else None

    def _enter(self, value: Value, at: int) -> None:
        """Clone a production whose inputs are there."""
        made = {handle: self._twin(handle) for handle in self._values.made(value)}
        for task in self._values.tasks(value):
            new = tuple((made.get(handle) or (self._now(handle, at) if mode == R else handle), mode) for handle, mode in task.accesses)
            self._tasks.append(replace(task, accesses=new, block=None, num_clones=1, clone_share=1.0))
        self._made.update(made)

    def _twin(self, handle: HandleRecord) -> HandleRecord:
        twin = replace(handle, id=HandleId(next(self._ids)), replicas={}, readers={})
        self._owned[twin] = False
        return twin
