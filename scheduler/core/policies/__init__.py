"""Which ready task a worker runs next: small pure classes behind `join`, `push` and `pop`.

A policy sees tasks that are ready (no unfinished predecessor) and workers with free slots. It never locks, measures or moves anything; what it may
ask of durations and memory is in its `Estimates`. All ties are broken by submission order, so equal events and estimates give equal decisions.

    eager   first ready, first served
    prio    priority, then submission order: keeps to the order in which the program was written, hence to its memory peak
    lws     a queue per worker where the data is, idle workers steal
    dm      the worker expected to end the task soonest: queued seconds + execution
    dmda    dm + the transfers of what is missing there, behind what its link has queued, + evictions where bytes are missing
    dmdas   dmda, each queue by priority, then submission order
    reuse   dmdas, data first: among the next tasks of the queue, the one that misses fewest bytes there (in the spirit of DARTS)

Modules: `base` (the interface), `simple` (eager, prio, lws), `costs` (what a task costs on a worker, and `explain`), `expected` (dm, dmda, dmdas),
`reuse`, `explained` (any of them, watched), `pinned` (any of them, beside tasks placed by hand).
"""

from __future__ import annotations

from typing import Final

from ..performance_model import Estimates, NoEstimates
from .base import Policy, PolicyFactory
from .costs import Candidate, explain
from .expected import DataAware, DataAwareSorted, ExpectedEnd
from .explained import Explained, Placement
from .pinned import Pinned
from .reuse import Reuse
from .simple import Eager, LocalityStealing, Prio

POLICIES: Final[dict[str, PolicyFactory]] = {
    "eager": Eager,
    "prio": Prio,
    "lws": LocalityStealing,
    "dm": ExpectedEnd,
    "dmda": DataAware,
    "dmdas": DataAwareSorted,
    "reuse": Reuse,
}
"""Every policy by the name users type."""

DEFAULT_POLICY: Final = "prio"
"""What "auto" stands for on a machine without devices."""

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Candidate",
    "DataAware",
    "DataAwareSorted",
    "Eager",
    "Estimates",
    "ExpectedEnd",
    "Explained",
    "LocalityStealing",
    "NoEstimates",
    "Pinned",
    "Placement",
    "Policy",
    "PolicyFactory",
    "Prio",
    "Reuse",
    "explain",
    "policy_of",
]


def policy_of(sched: str, num_devices: int) -> str:
    """The policy that a name stands for: "auto", or a key of `POLICIES`.

    Args:
        num_devices: workers with memory of their own.
    """
    if sched != "auto":
        return sched
    return "reuse" if num_devices else DEFAULT_POLICY
