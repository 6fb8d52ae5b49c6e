"""Scheduling policies, which choose the task that a worker runs next: small pure classes with `join`, `push` and `pop`.

A policy sees ready tasks and workers with free slots; its `Estimates` know durations and memory. Submission order breaks all ties.
    eager   first ready, first served
    prio    priority, then submission order, which stays close to the memory peak of the program as written
    lws     a queue per worker, on the node of the data; idle workers steal
    dm      the worker expected to end the task soonest: queued seconds + execution
    dmda    dm + transfers of missing inputs, including the wait for the link, + evictions if bytes are short
    dmdas   dmda, each queue by priority, then submission order
    reuse   dmdas, but of the next tasks of the queue, the one that misses fewest bytes on the node (in the spirit of DARTS)
Modules: `base` (interface), `simple`, `costs` (cost terms), `expected`, `reuse`, and the wrappers `explained` (records) and `pinned` (pins).
"""

from __future__ import annotations

from typing import Final

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
"""Every policy by the name that users type."""

MIXED_POLICIES: Final = ("dm", "dmda", "dmdas")
"""Policies that may choose between a CPU worker and a device for a task; "auto" then selects the last."""

DEFAULT_POLICY: Final = "prio"
"""Policy that "auto" selects on a machine without devices."""

__all__ = [
    "DEFAULT_POLICY",
    "MIXED_POLICIES",
    "POLICIES",
    "Candidate",
    "DataAware",
    "DataAwareSorted",
    "Eager",
    "ExpectedEnd",
    "Explained",
    "LocalityStealing",
    "Pinned",
    "Placement",
    "Policy",
    "Prio",
    "Reuse",
    "explain",
    "policy_of",
]


def policy_of(sched: str, num_devices: int, *, is_mixed: bool = False) -> str:
    """Return the name of the policy for `sched`, which is "auto" or a key of `POLICIES`.

    Args:
        num_devices: number of workers with memory of their own.
        is_mixed: whether both CPU workers and devices run the tasks that both can run.
    """
    if sched != "auto":
        return sched
    if is_mixed:
        return MIXED_POLICIES[-1]
    return "reuse" if num_devices else DEFAULT_POLICY
