"""The accesses of a recorded step in a given order, as the lower bounds (`byte_bound`, `time_bound`) see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler import SCRATCH
from scheduler.machine import HandleRecord, StepPlan


@dataclass(frozen=True, slots=True)
class AccessTrace:
    """The accesses of a serial execution.

    Args:
        accesses: for each position, (tile, mode) pairs, each tile once; modes are R, W and RW.
        sizes: bytes of each tile.
        persistent: for each tile, whether it outlives the period.
        scratch: bytes of scratch memory at each position.

    Raises:
        ValueError: lengths differ, a tile appears twice at a position, or a temporary is read before it is written.
    """

    accesses: list[list[tuple[int, str]]]
    sizes: list[int]
    persistent: list[bool]
    scratch: list[int]

    def __post_init__(self) -> None:
        if len(self.accesses) != len(self.scratch) or len(self.sizes) != len(self.persistent):
            raise ValueError(
                f"a trace has one scratch size per position and one persistent flag per tile, got {len(self.scratch)} for {len(self.accesses)} "
                f"positions and {len(self.persistent)} for {len(self.sizes)} tiles"
            )
        seen = set()
        for position, accesses in enumerate(self.accesses):
            if len(dict(accesses)) != len(accesses):
                raise ValueError(f"position {position} accesses a tile twice ({accesses}); merge the two into one RW")
            for tile, mode in accesses:
                if tile not in seen and not self.persistent[tile] and mode != "W":
                    raise ValueError(f"position {position} reads temporary tile {tile} (mode {mode}) before anything wrote it; is the order valid?")
                seen.add(tile)

    def needed(self) -> list[int]:
        """Return the bytes accessed at each position, scratch included."""
        return [sum(self.sizes[tile] for tile, _ in accesses) + extra for accesses, extra in zip(self.accesses, self.scratch, strict=True)]

    def live(self) -> list[int]:
        """Return the bytes of live data at each position: persistent tiles always, temporaries from first to last access, and scratch."""
        changes = [0] * (len(self.accesses) + 1)
        span: dict[int, tuple[int, int]] = {}
        for position, accesses in enumerate(self.accesses):
            for tile, _ in accesses:
                span[tile] = (span[tile][0] if tile in span else position, position)
        always = 0
        for tile, (first, last) in span.items():
            if self.persistent[tile]:
                always += self.sizes[tile]
            else:
                changes[first] += self.sizes[tile]
                changes[last + 1] -= self.sizes[tile]
        found = []
        for change, extra in zip(changes, self.scratch, strict=False):
            always += change
            found.append(always + extra)
        return found


def tiles_of(plan: StepPlan, order: Iterable[int]) -> list[HandleRecord]:
    """Return the handles of a trace's tiles: by first access in `order` (positions of tasks), scratch apart."""
    return [*dict.fromkeys(handle for at in order for handle, mode in plan.tasks[at].accesses if mode != SCRATCH)]


def trace_of(plan: StepPlan, order: Sequence[int]) -> AccessTrace:
    """Return the accesses of `plan` when its tasks run in `order` (positions of tasks); sizes are rounded to pages.

    Outputs count as persistent: they exist until the next period writes them.
    """
    tiles = tiles_of(plan, order)
    number = {handle: at for at, handle in enumerate(tiles)}
    accesses, scratch = [], []
    for position in order:
        row = []
        extra = 0
        for handle, mode in plan.tasks[position].accesses:
            if mode == SCRATCH:
                extra += handle.spec.size
            else:
                row.append((number[handle], str(mode)))
        accesses.append(row)
        scratch.append(extra)
    return AccessTrace(accesses, [handle.spec.size for handle in tiles], [plan.owned.get(handle, True) for handle in tiles], scratch)
