"""Where tasks may run: by what their codelets implement, what a worker's memory holds, and where the program has placed them by hand.

Everything here is decided when a task is submitted or recorded, so that the impossible is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .codelet import Codelet
from .core.errors import DoesNotFit, PlacementError
from .core.machine import Machine
from .core.records import NodeId, WorkerId, WorkerKind
from .crew import worker_name
from .frontend import Access


class Ability(NamedTuple):
    """Who can run codelets of one sort.

    Attributes:
        kinds: of workers.
        capacity: bytes of the largest memory one of them has.
        node: which one that is.
        pin: the worker's name, where it is only one that may.
    """

    kinds: tuple[WorkerKind, ...]
    capacity: int
    node: NodeId
    pin: str


def kinds_on(codelet: Codelet, worker: str) -> tuple[WorkerKind, ...]:
    """The kind of the worker of that name, on which a codelet is placed.

    Raises:
        PlacementError: the codelet has no implementation for it.
    """
    kinds, kind = codelet.kinds, worker.partition(":")[0]
    found = tuple(each for each in kinds if each == kind)
    if not found:
        raise PlacementError(
            f"{codelet!r} was placed on {worker} and runs on {', '.join(kinds) or 'nothing'}; give it an implementation for {kind} workers, or "
            f"submit it outside place({worker!r})"
        )
    return found


def find_ability(codelet: Codelet, machine: Machine, pin: WorkerId | None) -> Ability:
    """Who can run codelets with implementations like this one's: where there are GPUs, what can run there runs nowhere else.

    GPUs and CPUs round differently, so results would depend on who was free.

    Args:
        pin: the only worker that may; None for any.

    Raises:
        ValueError: no worker of the machine can.
        PlacementError: the worker that should cannot.
    """
    kinds, crew, name = codelet.kinds, machine.dispatch.crew, ""
    if pin is not None:
        worker = machine.dispatch.workers[pin]
        name = worker_name(worker)
        kinds, crew = kinds_on(codelet, name), [worker]
    elif "cuda" in kinds and any(worker.kind == "cuda" for worker in crew):
        kinds = ("cuda",)
    places = {worker.node for worker in (*crew, machine.dispatch.host) if worker.kind in kinds}
    if not places:
        present = ", ".join(sorted({worker.kind for worker in crew}))
        raise ValueError(f"{codelet!r} runs on {', '.join(kinds) or 'nothing'}, and there are only {present} workers")
    node = max(sorted(places), key=lambda place: machine.nodes[place].budget)
    return Ability(kinds, machine.nodes[node].budget, node, name)


def too_large(codelet: Codelet, accesses: Sequence[Access], nbytes: int, ability: Ability, machine: Machine) -> DoesNotFit:
    """The refusal of a task whose data exceeds every memory where it may run."""
    sizes = ", ".join(f"{mode} {handle.name or 'unnamed'} {handle.record.size:,} B" for handle, mode in accesses)
    where = f"the largest memory a worker of kind {' or '.join(ability.kinds)} has here; raise the budget or use smaller tiles or minibatches"
    node = machine.nodes[ability.node].name
    if ability.pin:
        where = f"{node}, where it was placed; raise the budget, use smaller tiles or minibatches, or submit it outside place({ability.pin!r})"
    return DoesNotFit(f"{codelet.name} needs {nbytes:,} B at once ({sizes}), more than the {ability.capacity:,} B of {where}", node)
