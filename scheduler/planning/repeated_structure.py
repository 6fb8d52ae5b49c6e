"""Detection of the repeated structure of a recorded step: its updates, minibatches, stages and layer groups (`Repetition` defines them).

A training step repeats the same tasks for every minibatch. The program does not declare the repetition, so it is inferred from the graph. The *key*
of a task is its codelet and the sources of its operands: a persistent tile, or the key of the task that wrote the operand. Task k of every minibatch
has the same key. Minibatches are the connected components that remain once edges are cut through data that outlives the step, through copies of
inputs, and through running sums of equal tasks (accumulated gradients).

Rules: pure and deterministic. A wrongly detected structure costs bytes, never correctness, because every order of it is executed by dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..core.records import RW, SCRATCH, HandleRecord, R
from ..core.step_plan import StepPlan

SCALAR_NBYTES: Final = 4096
"""Size in bytes up to which temporaries count as scalars: a task that creates no larger ones counts as creating nothing."""
FIRST: Final = -1
"""Minibatch of a task outside every minibatch and without predecessors, such as a copy of inputs."""
OUTSIDE: Final = -2
"""Minibatch of a task outside every minibatch, with predecessors."""


@dataclass(slots=True)
class Repetition:
    """The repeated structure of a step.

    Attributes:
        updates: for each task, whether it is an update: it creates at most scalars and is followed by updates only, such as an optimizer task or a
            norm of final gradients. In every order but "submission" it runs as soon as possible, because it ends the live range of a gradient.
        minibatch: minibatch of each task, from 0; negative outside every minibatch.
        stage: stage of each task, from 0 in the order of first occurrence; -1 outside every minibatch. Tasks of a stage have equal keys.
        layer_group: layer group of each stage, from 0: a run of stages over the same shared tiles, which are those that several minibatches touch
            (weights and gradient accumulators). A group grows while its shared tiles fit the size of the largest one. Later stages over the same
            tiles join it, unless they depend on a later group within their minibatch.
        turns: ranges (first, last) of layer groups around the loss, from narrow to wide, each within the next.
        num_minibatches: number of minibatches; 0 if nothing repeats.
    """

    updates: list[bool]
    minibatch: list[int]
    stage: list[int]
    layer_group: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    num_minibatches: int = 0


def repetition(plan: StepPlan) -> Repetition:
    """Infer the updates, minibatches, stages and layer groups of a step in submission order."""
    shrinking = _shrinking(plan)
    facts = _Facts(plan, shrinking)
    repeated = Repetition(facts.updates, facts.minibatches(), [-1] * len(plan.tasks))
    repeated.num_minibatches = max(repeated.minibatch, default=-1) + 1
    numbers: dict[int, int] = {}
    first: list[list[int]] = []  # tasks of each stage in the first minibatch that has it
    for position, minibatch in enumerate(repeated.minibatch):
        if minibatch >= 0:
            stage = repeated.stage[position] = numbers.setdefault(facts.keys[position], len(numbers))
            if stage == len(first):
                first.append([])
            if not first[stage] or repeated.minibatch[first[stage][0]] == minibatch:
                first[stage].append(position)
    shared = _shared_tiles(plan, repeated, len(numbers))
    recomputes = [tasks[0] in facts.recomputing for tasks in first]
    repeated.layer_group = _layer_groups(plan, repeated, first, shared, recomputes)
    repeated.turns = _turns(repeated.layer_group, shared)
    return repeated


def _shrinking(plan: StepPlan) -> list[bool]:
    """Return, for each task, whether it has predecessors, creates at most scalars, and is followed by such tasks only."""
    seen: set[HandleRecord] = set()
    creates = []
    for task in plan.tasks:
        new = [handle for handle, mode in task.accesses if mode != SCRATCH and handle not in seen]
        seen.update(new)
        creates.append(any(handle in plan.owned and handle.size > SCALAR_NBYTES for handle in new))
    shrinking = [False] * len(plan.tasks)
    for position in reversed(range(len(plan.tasks))):
        if plan.predecessors[position] and not creates[position]:
            shrinking[position] = all(shrinking[after] for after in plan.successors[position])
    return shrinking


@dataclass(slots=True)
class _Value:
    """Data that a handle holds at a point of the step.

    Attributes:
        key: number shared by equal data of all minibatches.
        writer: position of the task that wrote the data.
        is_constant: whether the data follows from inputs alone.
    """

    key: int
    writer: int
    is_constant: bool


class _Facts:
    """Keys, updates and connected components of a step, from one pass over it in submission order.

    Args:
        plan: the step.
        shrinking: for each task, whether it has predecessors, creates at most scalars, and is followed by such tasks only.

    Attributes:
        keys: key of each task.
        updates: for each task, whether it is an update.
        recomputing: positions of tasks that repeat an earlier task's work, and of tasks that depend on such results.
    """

    def __init__(self, plan: StepPlan, shrinking: Sequence[bool]) -> None:
        self.keys: list[int] = []
        self.updates: list[bool] = []
        self.recomputing: set[int] = set()
        self._owned = plan.owned
        self._shrinking = shrinking
        self._plan = plan
        self._parent = list(range(len(plan.tasks)))
        self._values: dict[HandleRecord, _Value] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._computed: dict[tuple[object, ...], int] = {}
        self._constant: set[int] = set()
        self._gradients = {
            handle
            for position, task in enumerate(plan.tasks)
            if shrinking[position] and self._writes_shared(position)
            for handle, mode in task.accesses
            if mode == R and handle in plan.owned
        }
        links = [self._enter(position) for position in range(len(plan.tasks))]
        for position in reversed(range(len(plan.tasks))):
            self.updates[position] &= all(self.updates[after] for after in plan.successors[position])
        for position, linked in enumerate(links):
            self._join(position, linked)

    def minibatches(self) -> list[int]:
        """Return `Repetition.minibatch`: minibatches are the connected components that share a key with another component."""
        components: dict[int, set[int]] = {}
        roots = [self._find(position) for position in range(len(self.keys))]
        inside = [not update and position not in self._constant for position, update in enumerate(self.updates)]
        for position, key in enumerate(self.keys):
            if inside[position]:
                components.setdefault(key, set()).add(roots[position])
        repeated = {root for each in components.values() if len(each) > 1 for root in each}
        number = {root: index for index, root in enumerate(sorted(repeated))}
        outside = [OUTSIDE if before else FIRST for before in self._plan.predecessors]
        return [number.get(root, outside[position]) if inside[position] else outside[position] for position, root in enumerate(roots)]

    def _enter(self, position: int) -> list[int]:
        """Set a task's key and whether it may be an update; return the positions of earlier tasks of the same component."""
        task = self._plan.tasks[position]
        reads = [(handle, self._values.get(handle)) for handle, mode in task.accesses if mode == R]
        origins: list[object] = [task.name]
        for handle, value in reads:
            origins.append(value.key if value is not None else -1 if handle.kind == "input" else (handle.id,))
        origins += [(handle.id,) for handle, mode in task.accesses if mode not in (R, SCRATCH) and handle not in self._owned]
        same = (task.name, *((handle.id, value and value.writer) for handle, value in reads))
        times = self._computed[same] = self._computed.get(same, -1) + 1 if reads else 0
        key = self._number((times, *origins))
        self.keys.append(key)
        writers = [value.writer for _, value in reads if value is not None and not value.is_constant]
        if times or any(writer in self.recomputing for writer in writers):
            self.recomputing.add(position)
        if all(value.is_constant if value is not None else handle.kind == "input" for handle, value in reads) and not self._writes_shared(position):
            self._constant.add(position)
        self.updates.append(self._is_update(position, reads))
        linked = writers + self._continued(position)
        for index, (handle, mode) in enumerate(task.accesses):
            if mode not in (R, SCRATCH):
                self._values[handle] = _Value(self._number((key, index)), position, position in self._constant)
        return linked

    def _is_update(self, position: int, reads: Sequence[tuple[HandleRecord, _Value | None]]) -> bool:
        """Whether the task is shrinking and does not add a minibatch's contribution to a gradient, which a task that is not shrinking computes."""
        if not self._shrinking[position] or self._writes_shared(position):
            return self._shrinking[position]
        return all(value is None or value.is_constant or handle in self._gradients or self._shrinking[value.writer] for handle, value in reads)

    def _join(self, position: int, linked: Sequence[int]) -> None:
        """Merge the component of a task with those of the earlier tasks `linked` to it."""
        if self.updates[position]:
            return
        for writer in linked:
            if not self.updates[writer]:
                one, other = self._find(position), self._find(writer)
                self._parent[max(one, other)] = min(one, other)

    def _continued(self, position: int) -> list[int]:
        """Return the last writers of the data that this task adds to, unless both tasks add contributions of one kind."""
        if self._shrinking[position]:
            return []
        writers = []
        for handle, mode in self._plan.tasks[position].accesses:
            value = self._values.get(handle) if mode == RW and handle not in self._gradients else None
            if value is not None and not self._shrinking[value.writer] and self.keys[value.writer] != self.keys[position]:
                writers.append(value.writer)
        return writers

    def _writes_shared(self, position: int) -> bool:
        """Whether the task writes data that outlives the step."""
        return any(mode not in (R, SCRATCH) and handle not in self._owned for handle, mode in self._plan.tasks[position].accesses)

    def _number(self, origins: tuple[object, ...]) -> int:
        """Return the number of a key, a new one at its first occurrence."""
        return self._numbers.setdefault(origins, len(self._numbers))

    def _find(self, position: int) -> int:
        """Return the root of a task's component."""
        parent = self._parent
        while parent[position] != position:
            parent[position] = position = parent[parent[position]]
        return position


def _shared_tiles(plan: StepPlan, repeated: Repetition, num_stages: int) -> list[dict[HandleRecord, None]]:
    """Return, for each stage, those of its tiles that several minibatches touch."""
    owner: dict[HandleRecord, int] = {}
    shared: set[HandleRecord] = set()
    for minibatch, task in zip(repeated.minibatch, plan.tasks, strict=True):
        if minibatch >= 0:
            for handle, mode in task.accesses:
                if mode != SCRATCH and owner.setdefault(handle, minibatch) != minibatch:
                    shared.add(handle)
    tiles: list[dict[HandleRecord, None]] = [{} for _ in range(num_stages)]
    for stage, task in zip(repeated.stage, plan.tasks, strict=True):
        if stage >= 0:
            tiles[stage].update((handle, None) for handle, mode in task.accesses if mode != SCRATCH and handle in shared)
    return tiles


def _layer_groups(
    plan: StepPlan,
    repeated: Repetition,
    first: Sequence[Sequence[int]],
    shared: Sequence[Mapping[HandleRecord, None]],
    recomputes: Sequence[bool],
) -> list[int]:
    """Return the layer group of each stage.

    Args:
        plan: the step.
        repeated: minibatches and stages of the step.
        first: positions of each stage's tasks in one minibatch.
        shared: shared tiles of each stage.
        recomputes: for each stage, whether it recomputes; such a stage never joins the layer group of the original.
    """
    limit = max((handle.size for tiles in shared for handle in tiles), default=0)
    groups: list[int] = []
    tiles_of: list[set[HandleRecord]] = [set()]
    group_of: dict[HandleRecord, int] = {}
    for stage, tiles in enumerate(shared):
        edges = ((task, before) for task in first[stage] for before in plan.predecessors[task])
        before = (repeated.stage[source] for task, source in edges if repeated.minibatch[source] == repeated.minibatch[task])
        earliest = max((groups[each] for each in before if 0 <= each < stage), default=0)
        known = {group_of.get(handle, -1) for handle in tiles}
        group = known.pop() if len(known) == 1 and not recomputes[stage] else -1
        if group < earliest:
            group = len(tiles_of) - 1
            if tiles and tiles_of[group] and sum(handle.size for handle in tiles_of[group].union(tiles)) > limit:
                tiles_of.append(set())
                group += 1
        tiles_of[group].update(tiles)
        group_of.update(dict.fromkeys(tiles, group))
        groups.append(group)
    return groups


def _turns(groups: Sequence[int], shared: Sequence[Mapping[HandleRecord, None]]) -> list[tuple[int, int]]:
    """Return nested ranges of layer groups around the loss, from narrow to wide, each from the first to the last use of some shared tile."""
    used: dict[HandleRecord, tuple[int, int]] = {}
    for group, tiles in zip(groups, shared, strict=True):
        for handle in tiles:
            low, high = used.get(handle, (group, group))
            used[handle] = min(low, group), max(high, group)
    ranges = sorted({each for each in used.values() if each[0] < each[1]}, key=lambda each: (each[1] - each[0], each))
    nested: list[tuple[int, int]] = []
    for low, high in ranges:
        if not nested or (low <= nested[-1][0] and nested[-1][1] <= high):
            nested.append((low, high))
    return nested
