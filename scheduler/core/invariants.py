"""Invariants that hold between any two events, over extents, ledger, replicas, pins and copies. Only tests check them; runs do not."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InvalidEvent
from .memory import coherence
from .memory.replicas import Replicas
from .records import FILE, Replica, Task


def check_replicas(replicas: Replicas, admitted: Sequence[Task]) -> None:
    """Check all invariants, given the tasks that are admitted now.

    Raises:
        InvalidEvent: an invariant is violated.
    """
    pins: dict[Replica, int] = {}
    used = [replica for task in admitted for replica in task.replicas]
    used += [replica for ends in replicas.copies for replica in ends]
    for replica in used:
        pins[replica] = pins.get(replica, 0) + 1
    for number, node in enumerate(replicas.nodes):
        node.validate()
        for replica in node.starts.values():
            if replica not in replicas.readers:
                _check_replica(replicas, replica, pins.pop(replica, 0))
            if replica.node != number:
                raise InvalidEvent(f"{replica.handle!r} is listed on node {number} but lives on node {replica.node}")
    replicas.reservations.validate(replica for replica in replicas.residents(replicas.last) if replica.is_backing)
    files = {replica for replica in pins if replica.node == FILE}
    for replica in files:
        _check_replica(replicas, replica, pins.pop(replica))
    for replica in pins:
        raise InvalidEvent(f"{replica.handle!r} on node {replica.node} is in use but was dropped")


def _check_replica(replicas: Replicas, replica: Replica, pins: int) -> None:
    handle, where = replica.handle, f"{replica.handle!r} on node {replica.node}"
    coherence.validate(handle)
    if replica.pins != pins:
        raise InvalidEvent(f"{where} has {replica.pins} pins, but {pins} tasks and copies use it")
    if replica.outgoing != sum(source is replica for source, _ in replicas.copies):
        raise InvalidEvent(f"{where} counts {replica.outgoing} copies out of it")
    if replica.state != "scratch" and handle.replicas.get(replica.node) is not replica:
        raise InvalidEvent(f"{where} is an orphan")
    if replica.state != "scratch" and not any(other.is_backing for other in handle.replicas.values()):
        raise InvalidEvent(f"{where} has no backing replica to go to")
    if replica.is_backing and replica.node not in (FILE, replicas.last):
        raise InvalidEvent(f"{where} is a backing replica that is not on the last tier")
    if replica.arriving != (replica in replicas.copies):
        raise InvalidEvent(f"{where}: lost track of a copy")
    is_empty_backing = replica.is_backing and len(handle.replicas) > 1
    if replica.state in ("reserved", "scratch") and not pins and not is_empty_backing:
        raise InvalidEvent(f"{where} is {replica.state} although nothing uses it")
    if handle.released and not handle.num_uses:
        raise InvalidEvent(f"{where} outlived its handle")
