"""Binding of a captured step to the data of the program that runs it.

A `CapturingRuntime` captures a step on symbolic handles, before any data exists, and a planner orders it. `Runtime.adopt` then gives each symbolic
handle of data from before the step a handle of the program, by name, so that neither the program nor the planner runs twice. The plan keeps its
symbolic handles; the instances of the step replace them. Handles that the step creates need no names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ..core.codelet import Codelet
from ..core.machine import Machine
from ..core.records import FILE, HandleRecord, WorkerId, WorkerKind
from ..core.step_plan import RecordedTask, StepPlan
from .lanes import Handle
from .placement import Ability, find_ability, too_large
from .recording import COPY_INPUT, RecordingError


@dataclass(frozen=True, slots=True)
class Binding:
    """Data that exists before a step and has one name in it, such as a tensor.

    Attributes:
        handles: its handles: symbolic ones in a captured step, else those of the program. Their views must be equal (`==`).
        is_written: whether the step writes some of it, instead of only reading it.
    """

    handles: Sequence[Handle]
    is_written: bool = False


def bind(plan: StepPlan, symbols: Mapping[str, Binding], data: Mapping[str, Binding]) -> dict[HandleRecord, Handle]:
    """Return the program's handle of each symbolic handle that a captured step uses; note which of them the step writes.

    Args:
        symbols: symbolic handles by name.
        data: handles of the program by name.

    Raises:
        RecordingError: a name is missing on one side, or its data differs there in size, view, kind, class or mode; the step uses data without a
            name, or uses a name in another mode; or two names have the same handle.
    """
    if one_sided := sorted(symbols.keys() ^ data.keys()):
        where = "captured step" if one_sided[0] in symbols else "program"
        raise RecordingError(f"a captured step and the program must have the same names, and only the {where} has {one_sided[0]}", "bind it on both")
    bound: dict[HandleRecord, Handle] = {}
    for name, symbol in symbols.items():
        check_alike(name, symbol, data[name])
        check_mode(name, plan, symbol)
        bound.update((symbolic.record, handle) for symbolic, handle in zip(symbol.handles, data[name].handles, strict=True))
    if len({handle.record for handle in bound.values()}) < sum(len(binding.handles) for binding in data.values()):
        raise RecordingError("each handle of a captured step must have one name, and two names have the same handle", "leave one name out")
    for record in plan.uses:
        if record not in plan.owned and record not in bound:
            task = plan.tasks[plan.uses[record].positions[0]].name
            raise RecordingError(f"data from before a captured step must have a name, and {record!r}, which {task} uses, has none", "bind it")
    bound = {record: handle for record, handle in bound.items() if record in plan.uses}
    for record, handle in bound.items():
        handle.written |= plan.uses[record].first_writer is not None
    return bound


def check_alike(name: str, symbol: Binding, binding: Binding) -> None:
    """Raise `RecordingError` unless data is the same in a captured step and in the program, except for its values."""
    facts, own = [[_facts(handle) for handle in side.handles] for side in (symbol, binding)]
    if len(facts) != len(own):
        raise RecordingError(f"{name} has {len(facts)} handles in a captured step, got {len(own)}", "capture it with the same tiles")
    for captured, given in zip(facts, own, strict=True):
        if captured != given:
            raise RecordingError(f"{name} must be what was captured, {captured}, got {given}", "capture the step anew")
    if symbol.is_written != binding.is_written:
        modes = ["written" if side.is_written else "only read" for side in (symbol, binding)]
        raise RecordingError(f"{name} is {modes[0]} in a captured step, and {modes[1]} by the program", "capture the step anew")


def check_mode(name: str, plan: StepPlan, symbol: Binding) -> None:
    """Raise `RecordingError` if a captured step uses data in another mode than its binding says. Data that it does not use passes."""
    uses = [plan.uses[handle.record] for handle in symbol.handles if handle.record in plan.uses]
    is_written = any(use.first_writer is not None for use in uses)
    if uses and is_written != symbol.is_written:
        does, should = ("writes", "only be read") if is_written else ("only reads", "be written")
        raise RecordingError(f"{name} must {should}, and the captured step {does} it", "declare it in the mode in which the step uses it")


def check_tasks(tasks: Sequence[RecordedTask], machine: Machine, *, is_mixed: bool = False) -> None:
    """Check that the workers of a machine are those for which tasks were captured, and that each task fits a memory.

    Args:
        is_mixed: argument of `placement.kinds_of`.

    Raises:
        RecordingError: a task was captured for other kinds of workers.
        PlacementError, ValueError: no worker has an implementation, as for `placement.find_ability`.
        DoesNotFit: a task exceeds the memory of every worker that may run it.
    """
    abilities: dict[tuple[tuple[WorkerKind, ...], WorkerId | None], Ability] = {}
    for task in tasks:
        codelet = cast(Codelet, task.codelet)
        key = codelet.kinds, task.pin
        ability = abilities.get(key) or abilities.setdefault(key, find_ability(codelet, machine, task.pin, is_mixed=is_mixed))
        if task.kinds != ability.kinds and codelet is not COPY_INPUT:
            were, are = ", ".join(task.kinds), ", ".join(ability.kinds)
            raise RecordingError(f"{task.name} was captured for workers of kinds {were}, got {are}", "capture the step for this machine")
        nbytes = sum(handle.spec.size for handle, _ in task.accesses)
        if nbytes > ability.capacity:
            raise too_large(codelet, task.accesses, nbytes, ability, machine)


def _facts(handle: Handle) -> tuple[object, ...]:
    record: HandleRecord = handle.record
    place = "in a file" if FILE in record.replicas else "in memory"
    return f"{record.spec.nbytes} B", record.spec.view, record.spec.kind, record.spec.data_class, place
