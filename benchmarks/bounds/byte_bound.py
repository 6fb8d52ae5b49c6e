"""A lower bound on the bytes that a fast memory must exchange with a slow one while a step runs in a given order, by linear programming.

The model. Tasks run one after another, and after the last one the step begins again in the same order. While a task runs, every tile it accesses is
wholly in the fast memory, and so is its scratch. Between two consecutive accesses of a tile any fraction of it may stay; a constant fraction is best,
since only the smallest counts.

- `in`: the fraction that did not stay is loaded before the next access.
- `out`: a leaving fraction that differs from the slow copy is written back first, each byte once per write epoch (the time from one write of the
  tile to the next): the epoch's write-back is the largest fraction missing in any of its intervals.
- An interval before a pure write costs nothing in either direction: its data is dead.
- Temporaries are dead before their first access and after their last. Persistent tiles live on: the interval after their last access ends at
  their first access in the next period.

Whole tiles, finite queues, concurrent tasks and fragmentation can only cost more, so any machine moves at least the bound in this order.

The program is that of `intervals`, with

    minimise    sum_j in_j (1 - x_j) + sum_e size_e y_e        in_j: size of j's tile

SciPy (extra `bench`) solves the program; it is imported when a bound is requested.
"""

from __future__ import annotations

from dataclasses import dataclass

from access_trace import AccessTrace
from intervals import UNIT, enter, intervals_of, tight_of
from linear_program import LinearProgram


@dataclass(frozen=True, slots=True)
class Bound:
    """Least bytes that move per period.

    Args:
        bytes_in: bytes loaded into the fast memory.
        bytes_out: bytes written back from it.
    """

    bytes_in: float
    bytes_out: float

    @property
    def total(self) -> float:
        """Bytes in both directions."""
        return self.bytes_in + self.bytes_out


def lower_bound(trace: AccessTrace, capacity: int) -> Bound:
    """Return the minimum number of bytes that any fractional eviction of `trace` moves per period.

    Args:
        trace: the accesses.
        capacity: bytes of the fast memory.

    Raises:
        ValueError: a single position needs more than `capacity`.
        RuntimeError: the solver failed.
        ImportError: SciPy is not installed.
    """
    tight = tight_of(trace, intervals_of(trace), capacity)
    if not len(tight.limits):
        return Bound(0.0, 0.0)
    program = LinearProgram()
    shares = enter(program, tight)
    found = program.minimise((shares.stays, -tight.size), (shares.written, tight.epoch_size))
    return Bound(UNIT * float(tight.size @ (1 - found[shares.stays])), UNIT * float(tight.epoch_size @ found[shares.written]))
