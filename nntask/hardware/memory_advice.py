"""Advice on shortages of memory in terms of flags: which budget to raise, and what to lower.

The scheduler knows nodes and bytes (`scheduler.Shortage`). `planning.fit_advice` computes values with which a step fits, before it runs; the advice
here is for a shortage during a run, or while memory is reserved.
"""

from __future__ import annotations

from scheduler import Shortage
from scheduler.machine import PROGRAM

from ..errors import DoesNotFit
from .machine_model import DISK
from .machine_spec import MachineSpec


def does_not_fit(shortage: Shortage, machine: MachineSpec, *, lower: str | None = None) -> DoesNotFit:
    """Return the error for a shortage, with the flags that help and their values; the kind of task determines which tile to lower.

    Args:
        lower: flags that make tasks smaller when they are lowered, for a command without flags of tiles; "" if it has none.
    """
    return DoesNotFit(shortage.fact, _remedy(shortage, machine, lower), shortage=shortage)


def is_device(node: str) -> bool:
    """Return whether a memory node, by its name, is that of a GPU, real or simulated."""
    return node.startswith(("cuda:", "sim:"))


def _remedy(shortage: Shortage, machine: MachineSpec, lower: str | None) -> str:
    disk = machine.disk
    if shortage.cause == "outside":
        return "lower --gpu-memory, or end other programs that use the card"
    if disk is not None and shortage.node == DISK:
        return f"raise SIZE in --disk {disk.directory}:SIZE, now --disk {disk.budget.text}"
    flag, budget = ("--gpu-memory", machine.device) if is_device(shortage.node) else ("--ram", machine.ram)
    flag += f" (now {budget.text or 'the default'})"
    is_full = shortage.cause != "task"  # else the task alone is too large, and free bytes elsewhere do not help
    if lower is not None:
        is_work = shortage.task != PROGRAM  # else it is a weight that is being loaded, or an input
        changes = [f"raise {flag}", *([f"lower {lower}"] if lower and is_work else []), *(["add --disk DIR"] if is_full and not disk else [])]
        return ", or ".join(changes)
    if is_full:
        return f"raise {flag}, lower --minibatch, or use --recompute block"
    return f"raise {flag}, or lower {_tile_flags(shortage.task)}"


def _tile_flags(task: str) -> str:
    """Return the flags of the tiles that make a task of that name smaller."""
    if any(word in task for word in ("head", "embedding", "cross_entropy")):
        return "--vocab-tile"
    if "attention" in task:
        return "--seq-tile or --head-tile"
    if "muon" in task:
        return "--inner-tile or --embd-tile"
    if "adam" in task or "sgd" in task:
        return "--inner-tile or --vocab-tile"
    return "--minibatch-tile or --seq-tile"
