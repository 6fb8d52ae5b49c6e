"""Hazard detection for a device: unordered accesses to the same bytes, found by vector clocks of streams (Mattern 1989).

Each stream counts its work. A clock holds, for every stream, how much of its work is known to have ended. Recording an event stores the clock of the
stream. A stream that waits for the event joins this clock to its own, and a wait of the host joins it to the host's clock, from which all later work
starts. Two accesses are ordered if the clock of the later one has counted the earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Access(NamedTuple):
    """Bytes that a piece of work reads or writes."""

    address: int
    nbytes: int
    is_written: bool


class Clock(dict[object, int]):
    """The number of ended pieces of work, by stream."""

    def join(self, other: Clock) -> None:
        """Add the work that has ended according to `other`."""
        for stream, number in other.items():
            if number > self.get(stream, 0):
                self[stream] = number

    def copy(self) -> Clock:
        """Return a copy of the present state."""
        return Clock(self)


class _Past(NamedTuple):
    number: int
    name: str
    access: Access


class Hazards:
    """The work that the host does not know to have ended.

    Attributes:
        host: clock shared by all threads of the host.
    """

    def __init__(self) -> None:
        self.host = Clock()
        self._past: dict[object, list[_Past]] = {}

    def add(self, stream: object, clock: Clock, name: str, accesses: Sequence[Access]) -> str:
        """Put work on a stream and advance the stream's clock; return a description of an unordered access that it meets, or ""."""
        self._forget()
        clock.join(self.host)
        clock[stream] = clock.get(stream, 0) + 1
        for other, past in self._past.items():
            if other is not stream:
                known = clock.get(other, 0)
                for earlier in (earlier for earlier in past if earlier.number > known):
                    for access in accesses:
                        if (access.is_written or earlier.access.is_written) and _overlap(access, earlier.access):
                            uses = f"{name} {_doing(access)} bytes that {earlier.name} {_doing(earlier.access)}"
                            return f"{uses} on another stream, and neither waits for the other"
        self._past.setdefault(stream, []).extend(_Past(clock[stream], name, access) for access in accesses)
        return ""

    def user_of(self, address: int, nbytes: int) -> str | None:
        """Return the name of work that touches these bytes and may not have ended; None without any."""
        self._forget()
        freed = Access(address, nbytes, True)
        return next((work.name for past in self._past.values() for work in past if _overlap(freed, work.access)), None)

    def _forget(self) -> None:
        """Drop the work that the host knows to have ended; the work of a stream ends in order."""
        for stream, past in self._past.items():
            known = self.host.get(stream, 0)
            if past and past[0].number <= known:
                self._past[stream] = [work for work in past if work.number > known]


def _overlap(one: Access, other: Access) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def _doing(access: Access) -> str:
    return "writes" if access.is_written else "reads"
