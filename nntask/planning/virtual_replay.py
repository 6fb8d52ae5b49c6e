"""Replay of a planned step in virtual time, with the durations and links of a machine model, to judge the plan or forecast its costs."""

from __future__ import annotations

import logging
from math import inf
from typing import Final
from weakref import WeakKeyDictionary

from scheduler import DoesNotFit
from scheduler.machine import ANY, StepPlan
from scheduler.planning import by_urgency
from scheduler.simulation import Simulation, simulate

from ..hardware.machine_model import MachineModel, durations, pace_on
from ..hardware.machine_spec import Scheduling

_LOG: Final = logging.getLogger(__name__)
_KNOWN: Final = WeakKeyDictionary[StepPlan, tuple[MachineModel, Scheduling, Simulation]]()
"""Latest replay of each plan: a plan that was judged is not replayed again for its costs."""

FEW_TASKS: Final = 3000
"""Largest number of tasks of a step that is replayed twice although memory is short, since virtual time is slow then. In host memory the second
replay moves within 2 % of the first.
"""
FEW_TASKS_ON_DEVICES: Final = 12_000
"""The same limit for steps with devices. Their replays differ: before the first one all data is in host memory, before the second it is where tasks
left it.
"""


def replay(plan: StepPlan, target: MachineModel, how: Scheduling, *, worst: bool = False) -> Simulation:
    """Replay a step, as it repeats in training.

    Args:
        plan: step in its planned order.
        how: eviction and prefetch policies.
        worst: whether all conditional tasks run.

    Raises:
        DoesNotFit: a task or the persistent data exceeds the budgets.
    """
    if not worst and plan in _KNOWN and _KNOWN[plan][:2] == (target, how):
        return _KNOWN[plan][2]
    _LOG.info("running %d tasks in virtual time", len(plan.tasks))
    recorded = plan
    if target.is_mixed and plan.window == ANY:
        plan = by_urgency(plan, pace_on(plan, target).seconds)
    is_short, has_devices = plan.needed_bytes() > target.memory, max(target.compute_nodes) > 0
    once = is_short and len(plan.tasks) > (FEW_TASKS_ON_DEVICES if has_devices else FEW_TASKS)
    simulation = simulate(
        plan,
        workers=target.workers,
        nodes=target.nodes,
        policy=target.policy,
        duration=durations(plan, target).of,
        transfer=target.models.transfer_seconds,
        storage=target.storage,
        channels=target.channels,
        eviction=how.evict,
        prefetch=how.prefetch,
        replays=1 if once else 2,
        ahead=not once,
        aside=target.aside,
        worst=worst,
    )
    if not worst:
        _KNOWN[recorded] = target, how, simulation
    return simulation


def replay_seconds(plan: StepPlan, target: MachineModel, how: Scheduling) -> float:
    """Return the seconds of `replay`; infinity if the step does not fit."""
    try:
        return replay(plan, target, how).seconds
    except DoesNotFit:
        return inf
