"""The structure of a recorded step, from the labels of its tasks: updates, minibatches and layer groups.

A program declares the phase, minibatch and module of each task (`core.step_plan.Label`), and nothing is inferred from the graph. A wrong label costs
bytes, never correctness, because every order of a step is executed by its dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..core.records import SCRATCH, HandleRecord
from ..core.step_plan import StepPlan

FIRST: Final = -1
"""Minibatch of a task outside every minibatch and without predecessors, such as a copy of inputs."""
OUTSIDE: Final = -2
"""Minibatch of a task outside every minibatch, with predecessors."""


@dataclass(slots=True)
class StepStructure:
    """The structure of a step.

    Attributes:
        updates: for each task, whether it is labelled as an update, depends on others, and only updates depend on it. In every order but
            "submission" updates run as soon as possible, because they end the live range of a gradient.
        minibatch: minibatch of each task, from 0; negative outside every minibatch.
        layer_group: layer group of each task, from 0; -1 outside every minibatch. A group is a run of operations over the same shared tiles, which
            are those that several minibatches touch (weights and sums of gradients). It grows while its shared tiles fit the size of the largest one.
            Later operations of the same module over the same tiles join it; so does the backward pass that follows its forward pass at once.
        turns: ranges (first, last) of layer groups around the loss, from narrow to wide, each within the next.
        num_minibatches: number of minibatches; 0 if there is only one.
    """

    updates: list[bool]
    minibatch: list[int]
    layer_group: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    num_minibatches: int = 0


def structure_of(plan: StepPlan) -> StepStructure:
    """Return the structure of a step in submission order. A minibatch is whatever has a backward pass of its own."""
    labels = [task.label for task in plan.tasks]
    updates = [label.phase == "update" and len(before) > 0 for label, before in zip(labels, plan.predecessors, strict=True)]
    for position in reversed(range(len(updates))):
        updates[position] &= all(updates[after] for after in plan.successors[position])
    numbers = sorted({label.minibatch for label in labels if label.phase == "backward"})
    number_of = {minibatch: number for number, minibatch in enumerate(numbers)} if len(numbers) > 1 else {}
    outside = [OUTSIDE if before else FIRST for before in plan.predecessors]
    minibatch = [
        outside[position] if updates[position] else number_of.get(label.minibatch, outside[position]) for position, label in enumerate(labels)
    ]
    structure = StepStructure(updates, minibatch, num_minibatches=len(number_of))
    shared = _shared_tiles(plan, minibatch)
    structure.layer_group = _layer_groups(plan, minibatch, shared)
    structure.turns = _turns(structure.layer_group, shared)
    return structure


def _shared_tiles(plan: StepPlan, minibatch: Sequence[int]) -> list[list[HandleRecord]]:
    """Return, for each task, those of its tiles that several minibatches touch; none outside every minibatch."""
    owner: dict[HandleRecord, int] = {}
    shared: set[HandleRecord] = set()
    numbered = zip(plan.tasks, minibatch, strict=True)
    tiles = [[handle for handle, mode in task.accesses if mode != SCRATCH] if number >= 0 else [] for task, number in numbered]
    for handles, number in zip(tiles, minibatch, strict=True):
        shared.update(handle for handle in handles if owner.setdefault(handle, number) != number)
    return [[handle for handle in handles if handle in shared] for handles in tiles]


def _layer_groups(plan: StepPlan, minibatch: Sequence[int], shared: Sequence[Sequence[HandleRecord]]) -> list[int]:
    """Return `StepStructure.layer_group`; tasks of one operation of a module that touch the same shared tiles are in one group."""
    limit = max((handle.spec.size for tiles in shared for handle in tiles), default=0)
    groups: list[int] = []
    known: dict[tuple[object, ...], int] = {}
    group_of: dict[HandleRecord, int] = {}
    held, last, first, module = set[HandleRecord](), 0, 0, None  # of the last group; number of the last group, and of the first one of the module
    for task, number, tiles in zip(plan.tasks, minibatch, shared, strict=True):
        stage = (task.label.phase, task.label.path, task.name, *(handle.id for handle in tiles))
        if number < 0:
            groups.append(-1)
            continue
        if stage not in known:
            if stage[:2] != module:
                first, module = last, stage[:2]
            of_tiles = {group_of.get(handle, -1) for handle in tiles}
            group = of_tiles.pop() if len(of_tiles) == 1 else -1
            if group < first:
                if tiles and held and sum(handle.spec.size for handle in held.union(tiles)) > limit:
                    last, held = last + 1, set()
                group = last
                held.update(tiles)
            group_of.update(dict.fromkeys(tiles, group))
            known[stage] = group
        groups.append(known[stage])
    return groups


def _turns(groups: Sequence[int], shared: Sequence[Sequence[HandleRecord]]) -> list[tuple[int, int]]:
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
