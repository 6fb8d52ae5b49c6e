"""Eligible workers of a task: by the implementations of its codelet, by the capacity of a worker's memory, and by the program's own placement.

Eligibility is decided when a task is submitted or recorded, so that an impossible task is refused before any kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.codelet import Codelet
from ..core.errors import DoesNotFit, PlacementError
from ..core.machine import Machine
from ..core.memory.eviction_policies import EVICTION_POLICIES
from ..core.policies import MIXED_POLICIES, POLICIES
from ..core.records import HandleRecord, Mode, NodeId, WorkerId, WorkerKind
from ..core.shortage import AccessSize, Shortage
from ..execution.workers import worker_name


class Ability(NamedTuple):
    """The workers that can run codelets with given implementations.

    Attributes:
        kinds: kinds of these workers.
        capacity: bytes of the largest memory that one of them has.
        node: node of that memory.
        pin: name of the only eligible worker; "" for any.
    """

    kinds: tuple[WorkerKind, ...]
    capacity: int
    node: NodeId
    pin: str


def kinds_on(codelet: Codelet, worker: str) -> tuple[WorkerKind, ...]:
    """Return the kind of the named worker, on which a codelet is placed.

    Raises:
        PlacementError: the codelet has no implementation for that kind.
    """
    kinds, kind = codelet.kinds, worker.partition(":")[0]
    placed = tuple(candidate for candidate in kinds if candidate == kind)
    if not placed:
        raise PlacementError(worker, codelet=codelet.name, kinds=kinds)
    return placed


def kinds_beside(kinds: tuple[WorkerKind, ...], device: WorkerKind) -> tuple[WorkerKind, ...]:
    """Return the kinds of workers that run a codelet if CPU workers run only codelets that devices of kind `device` cannot run."""
    return (device,) if device in kinds else ("cpu",) if "cpu" in kinds else kinds


def kinds_of(codelet: Codelet, aside: WorkerKind | None, *, has_gpus: bool, is_mixed: bool = False) -> tuple[WorkerKind, ...]:
    """Return the kinds of workers that may run a codelet that is not pinned.

    If there are GPUs, a codelet with a CUDA implementation runs on them only: GPUs and CPUs round differently, so results would depend on which
    worker was free. If CPU workers stand aside (`Worker.aside`), simulated devices take precedence in the same way.

    Args:
        aside: kind of the devices if CPU workers stand aside; else None.
        is_mixed: whether CPU workers run codelets with a CUDA implementation, too.
    """
    kinds = codelet.kinds
    if has_gpus and "cuda" in kinds:
        return (*(kind for kind in kinds if is_mixed and kind == "cpu"), "cuda")
    return kinds if aside is None else kinds_beside(kinds, aside)


def find_ability(codelet: Codelet, machine: Machine, pin: WorkerId | None, *, is_mixed: bool = False) -> Ability:
    """Return the workers that can run codelets with the same implementations as this one, by the rule of `kinds_of`.

    Args:
        pin: the only worker that may run the codelet; None for any.
        is_mixed: argument of `kinds_of`.

    Raises:
        ValueError: no worker of the machine has an implementation.
        PlacementError: the pinned worker has no implementation, or does not exist.
    """
    workers, name = machine.workers, ""
    if pin is not None:
        workers = [worker for worker in workers if worker.id == pin]
        if not workers:
            raise PlacementError(f"worker {pin}", workers=[worker_name(worker) for worker in machine.workers])
        name = worker_name(workers[0])
        kinds = kinds_on(codelet, name)
    else:
        device = next(worker.kind for worker in workers if not worker.aside) if any(worker.aside for worker in workers) else None
        kinds = kinds_of(codelet, device, has_gpus=any(worker.kind == "cuda" for worker in workers), is_mixed=is_mixed)
    nodes = {worker.node for worker in (*workers, machine.program) if worker.kind in kinds}
    if not nodes:
        present = ", ".join(sorted({worker.kind for worker in workers}))
        raise ValueError(f"{codelet!r} runs on {', '.join(kinds) or 'nothing'}, and there are only {present} workers")
    node = max(sorted(nodes), key=machine.memory.budget)
    return Ability(kinds, machine.memory.budget(node), node, name)


def too_large(codelet: Codelet, accesses: Sequence[tuple[HandleRecord, Mode]], nbytes: int, ability: Ability, machine: Machine) -> DoesNotFit:
    """Return the error for a task whose data exceeds the memory of every eligible worker."""
    sizes = tuple(AccessSize(mode, record.spec.name or "unnamed", record.spec.size) for record, mode in accesses)
    node = machine.memory.name_of(ability.node)
    shortage = Shortage("task", node, nbytes, ability.capacity, task=codelet.name, sizes=sizes, workers=ability.kinds, pin=ability.pin)
    return DoesNotFit(shortage)


def check_workers(cpu_workers: int, sim_gpus: int, num_gpus: int, *, aside: bool, mixed: bool) -> None:
    """Check the numbers of workers of a runtime; arguments as for `Runtime`.

    Raises:
        ValueError: there is no worker, devices are of two kinds, or `aside` or `mixed` has too few kinds of workers.
    """
    if mixed and (aside or not cpu_workers or not (num_gpus or sim_gpus)):
        beside = " that stand aside" if aside else ""
        raise ValueError(
            f"mixed=True needs CPU workers for all tasks, and a device; got {cpu_workers} CPU workers{beside} and {num_gpus or sim_gpus} devices; "
            "leave `mixed` out, or change them"
        )
    if aside and not (num_gpus or sim_gpus):
        raise ValueError(f"aside=True needs a device, got {cpu_workers} CPU workers and no device; leave `aside` out")
    if num_gpus and sim_gpus:
        raise ValueError(f"devices must be real or simulated, got {num_gpus} and {sim_gpus}; leave one kind out")
    devices = sim_gpus or num_gpus
    if cpu_workers < 0 or devices < 0 or cpu_workers + devices == 0:
        raise ValueError(f"a runtime needs at least one worker, got {cpu_workers} CPU workers and {devices} simulated devices")


def check_policies(sched: str, evict: str, *, mixed: bool) -> None:
    """Check the names of the policies of a runtime; arguments as for `Runtime`.

    Raises:
        ValueError: a name is unknown, or the scheduling policy compares no kinds of workers although `mixed` asks for it.
    """
    if mixed and sched not in ("auto", *MIXED_POLICIES):
        raise ValueError(f"mixed=True needs a policy that compares kinds of workers, got {sched!r}; use auto, {', '.join(MIXED_POLICIES)}")
    if sched != "auto" and sched not in POLICIES:
        raise ValueError(f"unknown scheduling policy {sched!r}; there are auto, {', '.join(POLICIES)}")
    if evict not in EVICTION_POLICIES:
        raise ValueError(f"unknown eviction policy {evict!r}; there are {', '.join(EVICTION_POLICIES)}")
