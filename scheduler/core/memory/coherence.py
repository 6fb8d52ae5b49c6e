"""Replicas of one handle on several nodes: the MSI protocol as a table.

Rule: the valid replicas of a handle are equal; at most one is "modified", and then it is the only valid one. "invalid" is the absence of a
replica; "reserved" is an extent without data yet. Knows nothing of tasks, extents or the drivers that copy.
"""

from __future__ import annotations

from typing import Final, Literal

from ..errors import InvalidEvent
from ..records import FILE, HandleRecord, Mode, NodeId, R, Replica, ReplicaState

ReplicaEvent = Literal["written", "copied from", "copy arrived"]

TRANSITIONS: Final[dict[tuple[ReplicaState, ReplicaEvent], ReplicaState]] = {
    ("reserved", "written"): "modified",
    ("shared", "written"): "modified",
    ("modified", "written"): "modified",
    ("shared", "copied from"): "shared",
    ("modified", "copied from"): "shared",
    ("reserved", "copy arrived"): "shared",
}
"""(state, event) -> next state; a pair that is missing is impossible."""


def step(replica: Replica, event: ReplicaEvent) -> None:
    """Move a replica to its next state.

    Raises:
        InvalidEvent: the event is impossible in this state.
    """
    try:
        replica.state = TRANSITIONS[replica.state, event]
    except KeyError:
        raise InvalidEvent(f"{replica.handle!r} on node {replica.node}: {event!r} is impossible while {replica.state}") from None


def best_source(handle: HandleRecord, target: Replica | None) -> Replica | None:
    """Return the replica to copy a handle from: that in host memory if valid, else the valid one on the lowest node, its file last; None if none."""
    best: Replica | None = None
    for replica in handle.replicas.values():  # hot path: half the time of `min` with a key
        if replica.state != "reserved" and replica is not target and (best is None or replica.node < best.node):
            best = replica
    return best


def is_needed(replica: Replica) -> bool:
    """Whether dropping this replica would lose data that may still be read.

    Lost data is not needed, nor is data about to be overwritten: an admitted task has reserved bytes for it elsewhere without fetching it.
    """
    handle = replica.handle
    if replica.state == "reserved" or handle.lost is not None:
        return False
    for other in handle.replicas.values():  # noqa: SIM110 - hot path: half the time of a generator
        if other is not replica and (other.state != "reserved" or (other.pins and not other.arriving)):
            return False
    return True


def wants_backing(handle: HandleRecord, mode: Mode, last: NodeId) -> bool:
    """Whether an access must reserve the backing replica: there is none on the last tier, and no file serves as one because the access only reads."""
    backing = handle.replicas.get(last)
    return (backing is None or not backing.is_backing) and (mode != R or FILE not in handle.replicas)


def validate(handle: HandleRecord) -> None:
    """Check the protocol's rule.

    Raises:
        InvalidEvent: the rule is broken.
    """
    valid = [replica for replica in handle.replicas.values() if replica.state != "reserved"]
    modified = [replica for replica in valid if replica.state == "modified"]
    if modified and len(valid) > 1:
        states = {replica.node: replica.state for replica in valid}
        raise InvalidEvent(f"{handle!r} is modified on one node while others hold it too: {states}")
    if any(replica.pins < 0 for replica in handle.replicas.values()):
        raise InvalidEvent(f"{handle!r} was unpinned more often than pinned")
