"""Orders in which a recorded step may execute: the candidates among which a planner chooses (`named` has the table).

An order sorts tasks by some of (group of minibatches, layer group, minibatch, position).

Rules: pure and deterministic. Every candidate is a topological order of the plan's predecessors for any graph, because the sorted sequence is
executed on demand, each task after its missing predecessors. So a wrongly detected structure costs bytes, never correctness. Tasks of kind host keep
their order of submission, because exchanges of one machine must have the same sequence on all others (`Dispatch.take_turns`).

Limit: a sum over tasks is a chain in submission order, and no order breaks it. If the head of minibatch 2 adds to a tied weight after the embedding
of minibatch 1, the backward passes run one after another; the program must submit the additions of one kind together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from ..core.step_plan import StepPlan
from .step_structure import FIRST, StepStructure, structure_of

TURNS: Final = 8
"""Number of equal parts into which the layer groups between the loss and the ends of the model are divided."""
ALWAYS: Final = ("submission", "eager-update", "layers")
"""Orders that every step has."""

_Key = tuple[int, ...]


def candidates(plan: StepPlan, structure: StepStructure | None = None) -> dict[str, list[int]]:
    """Return the candidate orders of a recorded step.

    Args:
        plan: the step in submission order.
        structure: `structure_of` of the plan, if it is already known.

    Returns:
        name -> positions of the plan's tasks in order of execution, each position once and after all its predecessors. "submission",
        "eager-update" and "layers" are always present; any other order only if it differs from all before it.
    """
    structure = structure_of(plan) if structure is None else structure
    groups = [1 << power for power in range(1, (structure.num_minibatches - 1).bit_length())]
    orders: dict[str, list[int]] = {}
    for name in (*ALWAYS, *(f"layers:{group}" for group in groups), *(f"turn:{number}/{TURNS}" for number in range(1, TURNS)), "forward"):
        order = named(plan, structure, name)
        if order is not None and (name in ALWAYS or order not in orders.values()):
            orders[name] = order
    return orders


def named(plan: StepPlan, structure: StepStructure, name: str) -> list[int] | None:
    """Return the order of that name, whether or not it is a candidate.

    ========================  ======================================================================================================
    ``submission``            the submission order
    ``eager-update``          the submission order, with updates as early as possible
    ``layers``                all minibatches pass a layer group before the next one starts: each weight is loaded once per pass,
                              each gradient accumulated in one go
    ``layers:G``              ``layers`` within groups of G minibatches, one group after another; candidates are G = 2, 4, ...
    ``turn:K/8``              ``layers`` far from the loss; the layer groups around it, K eighths of the way out, one minibatch after
                              another, forward and backward. Activations created there die before they are evicted, if the weights
                              of these groups fit memory together
    ``forward``               one minibatch after another forward and through the loss, ``layers`` on the way back. Weights are
                              loaded more often than in ``layers``; in return activations are evicted throughout the forward pass,
                              when that link is otherwise idle
    ========================  ======================================================================================================

    Args:
        structure: `structure_of` of the plan.
        name: name of the order.

    Returns:
        Positions of the plan's tasks in order of execution, which may equal another order; None if the step lacks the structure that the name
        refers to.
    """
    if name == "submission":
        return list(range(len(plan.tasks)))
    kind, _, size = name.partition(":")
    group, turn = len(plan.tasks), (0, -1)  # number of minibatches per group; range of layer groups that each minibatch passes as a whole
    eighths, turns = [f"{number}/{TURNS}" for number in range(1, TURNS)], structure.turns
    if kind == "layers" and size.isdecimal() and int(size):
        group = int(size)
    elif kind == "turn" and size in eighths and turns:
        turn = turns[(1 + eighths.index(size)) * len(turns) // TURNS]
    elif name == "forward" and turns:
        turn = (0, turns[0][1])
    elif name not in ALWAYS:
        return None

    def key(position: int) -> _Key:
        minibatch, layer_group = structure.minibatch[position], structure.layer_group[position]
        if name == "eager-update":
            return (position,)
        if minibatch < 0:
            return (-1 if minibatch == FIRST else len(plan.tasks), position)
        if turn[0] <= layer_group <= turn[1]:
            return (minibatch // group, turn[0], minibatch, layer_group, position)
        return (minibatch // group, layer_group, minibatch, position)

    return arrange(plan, structure.updates, key)


def arrange(plan: StepPlan, updates: Sequence[bool], key: Callable[[int], _Key]) -> list[int]:
    """Order tasks by ascending key, each after its missing predecessors, and updates at the earliest possible position.

    Args:
        plan: the step in submission order.
        updates: for each task, whether it is an update; only updates may follow an update.
        key: sort key of a task's position; keys are distinct.

    Returns:
        All positions in a topological order.
    """
    order: list[int] = []
    done = [False] * len(plan.tasks)
    predecessors, successors = [*plan.predecessors], [*plan.successors]
    for before, after in pairwise(plan.turns):
        if before not in plan.predecessors[after]:
            predecessors[after] = predecessors[after] | {before}
            successors[before] = [*successors[before], after]
    num_waiting = [len(before) for before in predecessors]

    def execute(position: int) -> None:
        """Append a task, and all updates that become ready."""
        stack = [position]
        while stack:
            task = stack.pop()
            done[task] = True
            order.append(task)
            ready = []
            for after in successors[task]:
                num_waiting[after] -= 1
                if not num_waiting[after] and updates[after]:
                    ready.append(after)
            stack.extend(reversed(ready))

    keys = [key(position) for position in range(len(plan.tasks))]
    for wanted in sorted((position for position in range(len(keys)) if not updates[position]), key=keys.__getitem__):
        stack = [wanted]
        while stack:
            task = stack[-1]
            missing = [] if done[task] else [before for before in predecessors[task] if not done[before]]
            if missing:
                stack.extend(sorted(missing, key=keys.__getitem__, reverse=True))
            else:
                stack.pop()
                if not done[task]:
                    execute(task)
    return order
