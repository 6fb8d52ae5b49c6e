"""Work of a device that touches the same bytes in no order: vector clocks of streams (Mattern 1989), and what was put on them.

Each stream counts its work. A clock says of every stream how much of its work is over where the clock stands; a record of an event keeps the stream's
clock, a wait for the event joins it to another one's, and a wait of the host joins it to the host's, which all later work begins from. Two accesses
are in order when the later one's clock has counted the earlier one.
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
    """How much of each stream's work is over."""

    def join(self, other: Clock) -> None:
        """What is over by either of both."""
        for stream, number in other.items():
            if number > self.get(stream, 0):
                self[stream] = number

    def copy(self) -> Clock:
        """As it is now."""
        return Clock(self)


class _Past(NamedTuple):
    number: int
    name: str
    access: Access


class Hazards:
    """What the host does not know to be over.

    Attributes:
        host: the clock of all threads of the host.
    """

    def __init__(self) -> None:
        self.host = Clock()
        self._past: dict[object, list[_Past]] = {}

    def add(self, stream: object, clock: Clock, name: str, accesses: Sequence[Access]) -> str:
        """Put work on a stream, whose clock goes on; what it meets in no order, in words, or an empty text."""
        self._forget()
        clock.join(self.host)
        clock[stream] = clock.get(stream, 0) + 1
        for other, past in self._past.items():
            if other is not stream:
                known = clock.get(other, 0)
                for one in (one for one in past if one.number > known):
                    for access in accesses:
                        if (access.is_written or one.access.is_written) and _overlap(access, one.access):
                            return f"{name} {_doing(access)} what {one.name} {_doing(one.access)} on another stream, and neither waits for the other"
        self._past.setdefault(stream, []).extend(_Past(clock[stream], name, access) for access in accesses)
        return ""

    def user_of(self, address: int, nbytes: int) -> str | None:
        """Work that may not be over and touches these bytes."""
        self._forget()
        freed = Access(address, nbytes, True)
        return next((one.name for past in self._past.values() for one in past if _overlap(freed, one.access)), None)

    def _forget(self) -> None:
        """Drop what the host knows to be over; a stream's work is in order."""
        for stream, past in self._past.items():
            known = self.host.get(stream, 0)
            if past and past[0].number <= known:
                self._past[stream] = [one for one in past if one.number > known]


def _overlap(one: Access, other: Access) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def _doing(access: Access) -> str:
    return "writes" if access.is_written else "reads"
