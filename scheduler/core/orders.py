"""Orders in which a recorded step may execute: the candidates among which a planner chooses.

Theory of operation. A training step repeats the same tasks for every minibatch, and nobody tells the scheduler so. It is found in the graph:

- *Updates* allocate nothing worth mentioning and only updates follow them: optimizer tasks, norms of final gradients. In every order but the
  submitted one they run as soon as their predecessors have, because a gradient that has been used up is memory.
- *Minibatches* are the parts into which the other tasks fall when data that outlives the step, copies of inputs and running sums over equal
  tasks (accumulated gradients) are cut.
- The *key* of a task is its codelet and what it reads: a persistent tile, or the key of whoever made the data. Task k of every minibatch has the
  same key. A key's first occurrence is its *stage*.
- A *band* is a run of stages over the same shared tiles, those that several minibatches touch: weights and gradient accumulators. It grows while
  its shared tiles fit the size of the largest one, and takes in later stages over the same tiles whose inputs allow it.

An order sorts tasks by some of (group of minibatches, band, minibatch, position):

========================  ==========================================================================================================
``submission``            as submitted
``eager-update``          the same, with updates as early as they can
``layers``                all minibatches pass a band before the next band starts: a weight is loaded once per pass, a gradient summed in one go
``layers:G``              the same within groups of G minibatches, groups one after another; candidates are G = 2, 4, ...
``turn:K/8``              as ``layers`` far from the loss; the bands around it, K eighths of the way out, one minibatch after the other, forward and
                          backward. Activations born there die before they need be evicted, if the weights in there fit memory together
``forward``               one minibatch after the other forward and through the loss; as ``layers`` on the way back. Loads weights more often than
                          ``layers``; in return activations leave all along the way to the last loss, when that link is idle otherwise
========================  ==========================================================================================================

Rules: pure and deterministic; every candidate is a topological order of the plan's predecessors, whatever the graph looks like: the sorted
sequence is executed on demand, each task after its missing predecessors. So structure that is found wrongly costs bytes, never correctness.

What it cannot do: a sum over tasks is a chain in submission order, and no order breaks it. A tied weight, to which the head of minibatch 2 adds
after the embedding of minibatch 1 has, forces the backward passes one after another; the program must submit the additions of one kind together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .records import RW, SCRATCH, HandleRecord, R
from .steps import StepPlan

SCALAR_NBYTES: Final = 4096
"""A task that creates only temporaries up to this size counts as creating nothing."""
TURNS: Final = 8
"""Into how many parts the way from the loss to the ends of the model is cut."""
ALWAYS: Final = ("submission", "eager-update", "layers")
"""Orders that every step has."""

_Key = tuple[int, ...]
_FIRST: Final = -1  # minibatch of tasks that wait for nothing and belong to none, such as copies of inputs
_NONE: Final = -2  # of other tasks that belong to none


@dataclass(slots=True)
class Repetition:
    """What repeats in a step: one entry per task, then one per stage.

    Attributes:
        updates: whether the task runs as soon as it can.
        minibatch: from 0; negative for tasks outside every minibatch.
        stage: from 0, ascending with first occurrence; -1 outside every minibatch.
        band: of each stage, from 0. A stage's predecessors within its minibatch are never in a later band.
        window: of each band, the band from which on the turn has been entered and the one with which it is left again, if its tiles have one.
        num_minibatches: how many were found; 0 where nothing repeats.
    """

    updates: list[bool]
    minibatch: list[int]
    stage: list[int]
    band: list[int] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    num_minibatches: int = 0


def candidates(plan: StepPlan, found: Repetition | None = None) -> dict[str, list[int]]:
    """Execution orders of a recorded step, by name.

    Args:
        found: `repetition` of the plan, if it is known already.

    Returns:
        name -> positions of the plan's tasks in order of execution, each position once and after all its predecessors. "submission",
        "eager-update" and "layers" are always there, the others where they differ from those before them.
    """
    found = repetition(plan) if found is None else found
    groups = [1 << power for power in range(1, (found.num_minibatches - 1).bit_length())]
    orders: dict[str, list[int]] = {}
    for name in (*ALWAYS, *(f"layers:{group}" for group in groups), *(f"turn:{part}/{TURNS}" for part in range(1, TURNS)), "forward"):
        order = named(plan, found, name)
        if order is not None and (name in ALWAYS or order not in orders.values()):
            orders[name] = order
    return orders


def named(plan: StepPlan, found: Repetition, name: str) -> list[int] | None:
    """The order of that name, be it a candidate or not: it may equal another. None where the step lacks what the name speaks of.

    Args:
        found: `repetition` of the plan.
    """
    if name == "submission":
        return list(range(len(plan.tasks)))
    if name == "eager-update":
        return arrange(plan, found.updates, lambda position: (position,))
    if name == "layers":
        return banded(plan, found)
    kind, _, size = name.partition(":")
    if kind == "layers" and size.isdecimal() and int(size):
        return banded(plan, found, group=int(size))
    turns = [f"{part}/{TURNS}" for part in range(1, TURNS)]
    if kind == "turn" and size in turns and found.windows:
        return banded(plan, found, window=found.windows[(1 + turns.index(size)) * len(found.windows) // TURNS])
    if name == "forward" and found.windows:
        return banded(plan, found, window=(0, found.windows[0][1]))
    return None


def banded(plan: StepPlan, found: Repetition, *, group: int | None = None, window: tuple[int, int] = (0, -1)) -> list[int]:
    """The order by (group of minibatches, band, minibatch, position), with updates as early as they can.

    Args:
        group: minibatches per group; None for all.
        window: first and last band of a range that each minibatch passes as a whole before the next one enters it.
    """
    low, high = window

    def key(position: int) -> _Key:
        minibatch = found.minibatch[position]
        if minibatch < 0:
            return (-1 if minibatch == _FIRST else len(plan.tasks), position)
        band = found.band[found.stage[position]]
        number = minibatch // group if group else 0
        if low <= band <= high:
            return (number, low, minibatch, band, position)
        return (number, band, minibatch, position)

    return arrange(plan, found.updates, key)


def arrange(plan: StepPlan, updates: Sequence[bool], key: Callable[[int], _Key]) -> list[int]:
    """Execute tasks by ascending key, each after those of its predecessors that are still missing, and updates at the earliest possible moment.

    Args:
        updates: whether a task is one; only updates may follow it.
        key: of a task's position; distinct.

    Returns:
        All positions in a topological order.
    """
    order: list[int] = []
    done = [False] * len(plan.tasks)
    num_waiting = [len(before) for before in plan.predecessors]

    def execute(position: int) -> None:
        stack = [position]
        while stack:
            task = stack.pop()
            done[task] = True
            order.append(task)
            ready = []
            for after in plan.successors[task]:
                num_waiting[after] -= 1
                if not num_waiting[after] and updates[after]:
                    ready.append(after)
            stack.extend(reversed(ready))

    keys = {position: key(position) for position in range(len(plan.tasks)) if not updates[position]}
    for wanted in sorted(keys, key=keys.__getitem__):
        stack = [wanted]
        while stack:
            task = stack[-1]
            missing = [] if done[task] else [before for before in plan.predecessors[task] if not done[before]]
            if missing:
                stack.extend(sorted(missing, key=keys.__getitem__, reverse=True))
            else:
                stack.pop()
                if not done[task]:
                    execute(task)
    return order


def repetition(plan: StepPlan) -> Repetition:
    """Find updates, minibatches, stages and bands of a step."""
    shrinking = _shrinking(plan)
    facts = _Facts(plan, shrinking)
    found = Repetition(facts.updates, facts.minibatches(), [-1] * len(plan.tasks))
    found.num_minibatches = max(found.minibatch, default=-1) + 1
    numbers: dict[int, int] = {}
    first: list[list[int]] = []  # tasks of each stage in the first minibatch that has it
    for position, minibatch in enumerate(found.minibatch):
        if minibatch >= 0:
            stage = found.stage[position] = numbers.setdefault(facts.keys[position], len(numbers))
            if stage == len(first):
                first.append([])
            if not first[stage] or found.minibatch[first[stage][0]] == minibatch:
                first[stage].append(position)
    shared = _shared_tiles(plan, found, len(numbers))
    again = [tasks[0] in facts.again for tasks in first]
    found.band = _bands(plan, found, first, shared, again)
    found.windows = _windows(found.band, shared)
    return found


def _shrinking(plan: StepPlan) -> list[bool]:
    """Whether each task has predecessors, creates scalars at most, and is followed by such tasks only."""
    seen: set[HandleRecord] = set()
    creates = []
    for task in plan.tasks:
        new = [handle for handle, mode in task.accesses if mode != SCRATCH and handle not in seen]
        seen.update(new)
        creates.append(any(handle in plan.owned and handle.size > SCALAR_NBYTES for handle in new))
    found = [False] * len(plan.tasks)
    for position in reversed(range(len(plan.tasks))):
        found[position] = bool(plan.predecessors[position]) and not creates[position] and all(found[after] for after in plan.successors[position])
    return found


@dataclass(slots=True)
class _Value:
    """The data a handle holds at a point of the step.

    Attributes:
        key: same for the same data of another minibatch.
        writer: position of the task.
        is_constant: whether it was made of nothing but inputs.
    """

    key: int
    writer: int
    is_constant: bool


class _Facts:
    """One pass over a step in submission order: keys, updates, and which tasks belong together.

    Attributes:
        keys: of each task.
        updates: whether each task is one.
        again: tasks that compute once more what an earlier one has (recomputation), and those that read their results.
    """

    def __init__(self, plan: StepPlan, shrinking: Sequence[bool]) -> None:
        self.keys: list[int] = []
        self.updates: list[bool] = []
        self.again: set[int] = set()
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
        """Minibatch of each task, see `Repetition`: a part of the graph that shares a key with another part."""
        parts: dict[int, set[int]] = {}
        roots = [self._find(position) for position in range(len(self.keys))]
        inside = [not update and position not in self._constant for position, update in enumerate(self.updates)]
        for position, key in enumerate(self.keys):
            if inside[position]:
                parts.setdefault(key, set()).add(roots[position])
        repeated = {root for each in parts.values() if len(each) > 1 for root in each}
        number = {root: at for at, root in enumerate(sorted(repeated))}
        outside = [_NONE if before else _FIRST for before in self._plan.predecessors]
        return [number.get(root, outside[at]) if inside[at] else outside[at] for at, root in enumerate(roots)]

    def _enter(self, position: int) -> list[int]:
        """Learn a task's key, and whether it is an update but for what follows it; returns the tasks that belong to the same part."""
        task = self._plan.tasks[position]
        reads = [(handle, self._values.get(handle)) for handle, mode in task.accesses if mode == R]
        parts: list[object] = [task.name]
        for handle, value in reads:
            parts.append(value.key if value is not None else -1 if handle.kind == "input" else (handle.id,))
        parts += [(handle.id,) for handle, mode in task.accesses if mode not in (R, SCRATCH) and handle not in self._owned]
        same = (task.name, *((handle.id, value and value.writer) for handle, value in reads))
        times = self._computed[same] = self._computed.get(same, -1) + 1 if reads else 0
        key = self._number((times, *parts))
        self.keys.append(key)
        writers = [value.writer for _, value in reads if value is not None and not value.is_constant]
        if times or any(writer in self.again for writer in writers):
            self.again.add(position)
        if all(value.is_constant if value is not None else handle.kind == "input" for handle, value in reads) and not self._writes_shared(position):
            self._constant.add(position)
        self.updates.append(self._is_update(position, reads))
        linked = writers + self._continued(position)
        for at, (handle, mode) in enumerate(task.accesses):
            if mode not in (R, SCRATCH):
                self._values[handle] = _Value(self._number((key, at)), position, position in self._constant)
        return linked

    def _is_update(self, position: int, reads: Sequence[tuple[HandleRecord, _Value | None]]) -> bool:
        """Shrinking, and not a contribution of some minibatch: those read what a task made that is not shrinking."""
        if not self._shrinking[position] or self._writes_shared(position):
            return self._shrinking[position]
        return all(value is None or value.is_constant or handle in self._gradients or self._shrinking[value.writer] for handle, value in reads)

    def _join(self, position: int, linked: Sequence[int]) -> None:
        """Put a task and those whose results it reads, or goes on summing up, into one part."""
        if self.updates[position]:
            return
        for writer in linked:
            if not self.updates[writer]:
                one, other = self._find(position), self._find(writer)
                self._parent[max(one, other)] = min(one, other)

    def _continued(self, position: int) -> list[int]:
        """The tasks whose unfinished results this one goes on with, except where both add the same kind of contribution."""
        if self._shrinking[position]:
            return []
        found = []
        for handle, mode in self._plan.tasks[position].accesses:
            value = self._values.get(handle) if mode == RW and handle not in self._gradients else None
            if value is not None and not self._shrinking[value.writer] and self.keys[value.writer] != self.keys[position]:
                found.append(value.writer)
        return found

    def _writes_shared(self, position: int) -> bool:
        return any(mode not in (R, SCRATCH) and handle not in self._owned for handle, mode in self._plan.tasks[position].accesses)

    def _number(self, parts: tuple[object, ...]) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))

    def _find(self, position: int) -> int:
        parent = self._parent
        while parent[position] != position:
            parent[position] = position = parent[parent[position]]
        return position


def _shared_tiles(plan: StepPlan, found: Repetition, num_stages: int) -> list[dict[HandleRecord, None]]:
    """Of each stage, the tiles it touches that several minibatches touch."""
    owner: dict[HandleRecord, int] = {}
    shared: set[HandleRecord] = set()
    for minibatch, task in zip(found.minibatch, plan.tasks, strict=True):
        if minibatch >= 0:
            for handle, mode in task.accesses:
                if mode != SCRATCH and owner.setdefault(handle, minibatch) != minibatch:
                    shared.add(handle)
    tiles: list[dict[HandleRecord, None]] = [{} for _ in range(num_stages)]
    for stage, task in zip(found.stage, plan.tasks, strict=True):
        if stage >= 0:
            tiles[stage].update((handle, None) for handle, mode in task.accesses if mode != SCRATCH and handle in shared)
    return tiles


def _bands(
    plan: StepPlan,
    found: Repetition,
    first: Sequence[Sequence[int]],
    shared: Sequence[Mapping[HandleRecord, None]],
    again: Sequence[bool],
) -> list[int]:
    """Band of each stage.

    Args:
        first: tasks of each stage in one minibatch.
        shared: tiles of each stage.
        again: whether a stage recomputes; such a stage never goes back to the band of the original.
    """
    limit = max((handle.size for tiles in shared for handle in tiles), default=0)
    bands: list[int] = []
    tiles_of: list[set[HandleRecord]] = [set()]
    band_of: dict[HandleRecord, int] = {}
    for stage, tiles in enumerate(shared):
        before = (found.stage[p] for at in first[stage] for p in plan.predecessors[at] if found.minibatch[p] == found.minibatch[at])
        earliest = max((bands[each] for each in before if 0 <= each < stage), default=0)
        known = {band_of.get(handle, -1) for handle in tiles}
        band = known.pop() if len(known) == 1 and not again[stage] else -1
        if band < earliest:
            band = len(tiles_of) - 1
            if tiles and tiles_of[band] and sum(handle.size for handle in tiles_of[band].union(tiles)) > limit:
                tiles_of.append(set())
                band += 1
        tiles_of[band].update(tiles)
        band_of.update(dict.fromkeys(tiles, band))
        bands.append(band)
    return bands


def _windows(bands: Sequence[int], shared: Sequence[Mapping[HandleRecord, None]]) -> list[tuple[int, int]]:
    """Ranges of bands around the loss, from narrow to wide, each within the next: from the first to the last use of some shared tile."""
    used: dict[HandleRecord, tuple[int, int]] = {}
    for band, tiles in zip(bands, shared, strict=True):
        for handle in tiles:
            low, high = used.get(handle, (band, band))
            used[handle] = min(low, band), max(high, band)
    ranges = sorted({each for each in used.values() if each[0] < each[1]}, key=lambda each: (each[1] - each[0], each))
    nested: list[tuple[int, int]] = []
    for low, high in ranges:
        if not nested or (low <= nested[-1][0] and nested[-1][1] <= high):
            nested.append((low, high))
    return nested
