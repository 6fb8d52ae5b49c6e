"""Handles and their lanes: the rewriting of REDUX to plain accesses, before any scheduler sees it.

A handle has L *lanes*, which are partial accumulators. Contribution *i* goes to lane *i mod L*; the first lane with a contribution is the handle
itself. Contributions are counted, or numbered by the program (`contribution`), so that other processes may compute some of them. The first kernel
that writes a lane gets ``accumulate=False``, so no task clears memory first. The next access with another mode first combines the lanes in a fixed
tree: lane j receives lane j + s for s = 1, 2, 4, ... The tree depends on submission order and L alone, never on workers or time, so results are
bit-identical on any machine.
"""

from __future__ import annotations

import abc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.codelet import Codelet
from ..core.records import RW, Condition, HandleSpec, Mode, R, W, WorkerId, WorkerKind
from .labels import current_contribution

View = Callable[[Any, int], Any]
"""(memory of a node, byte offset in it) -> the kernel's argument."""


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Handle:
    """A piece of data that the scheduler moves and tracks.

    Args:
        record: the runtime's own record of the data; opaque to programs.
        spec: size, view, name and class of the data.
        combine: codelet called as ``combine(total RW, other R)``; required if the handle is summed in more than one lane.
        inbox: receives the record when the handle is released, by a finalizer, so that `append` must neither lock nor call back; None for no inbox.

    Attributes:
        written: whether a task writes it, or the first lane.
        num_contributions: number of counted contributions since the lanes were last combined.
        lanes: partial accumulators by number; None outside a sum.
        has_flags: whether a task has written flags to it (`Condition.flags`).
    """

    record: Any
    spec: HandleSpec
    combine: Codelet | None
    inbox: deque[Any] | None
    written: bool = False
    num_contributions: int = 0
    lanes: dict[int, Handle] | None = None
    has_flags: bool = False

    def __del__(self) -> None:
        inbox = getattr(self, "inbox", None)  # absent when __init__ itself failed
        if inbox is not None:
            inbox.append(self.record)

    @property
    def nbytes(self) -> int:
        """Exact size in bytes."""
        return self.spec.nbytes

    @property
    def name(self) -> str:
        """Name in reports and messages."""
        return self.spec.name

    @property
    def view(self) -> View:
        """Function that creates the kernel's argument from a node's memory and an offset."""
        return self.spec.view  # type: ignore[return-value]  # `handle` has put a View there

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {self.nbytes} B)"


Access = tuple[Handle, Mode]

Eligible = tuple[tuple[WorkerKind, ...], WorkerId | None]
"""Kinds of workers that may run a task, and the only worker that may, if the program has pinned the task."""

Terms = tuple[tuple[WorkerKind, ...], WorkerId | None, Condition | None]
"""Kinds of workers that may run a task; the only worker that may, if the program has pinned the task; and the task's condition."""


class LaneSums(abc.ABC):
    """The sums of a runtime, which are computed in lanes.

    Args:
        lanes: L, the number of partial accumulators of REDUX; a property of the numerics, like a tile size.
    """

    def __init__(self, lanes: int = 1) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}; use --lanes 1 for plain sums")
        self.lanes = lanes
        self._summing: weakref.WeakSet[Handle] = weakref.WeakSet()

    @abc.abstractmethod
    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Eligible:
        """Return the workers that may run a task; refuse a task that no worker can run, before any state has changed.

        Args:
            combines: whether the task combines lanes: it then belongs to earlier submissions, and is not pinned.
        """

    @abc.abstractmethod
    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        """Take one examined task, whose modes are R, W, RW and SCRATCH."""

    @property
    def num_open_lanes(self) -> int:
        """Number of lanes that receive contributions from the tasks that are submitted now: one of a numbered contribution, else L."""
        return self.lanes if current_contribution() is None else 1

    def _next_lane(self, handle: Handle) -> tuple[int, Handle | None]:
        """Return the number of the lane of the next contribution to `handle`, and the lane, or None if it does not exist yet."""
        number = current_contribution()
        if number is None:
            number = 0 if handle.lanes is None else handle.num_contributions
        number %= self.lanes
        return number, handle.lanes.get(number) if handle.lanes else handle

    def _uneven_sums(self, codelet: Codelet, handles: Sequence[Handle]) -> Sequence[Handle]:
        """Return the handles to which one task contributes, if their lanes must be combined first: a kernel has one `accumulate` for all of its sums.

        The counts of contributions differ after the program has read some of the sums. Combining the lanes of all of them makes the counts equal.

        Raises:
            ValueError: even so, the task would begin some of the sums and continue others.
        """
        lanes = [self._next_lane(handle)[1] if self.lanes > 1 else handle for handle in handles]
        if len({lane is not None and lane.written for lane in lanes}) == 1:
            return ()
        if len({handle.written for handle in handles}) == 1:
            return handles
        begun, fresh = ([handle for handle in handles if handle.written == is_begun] for is_begun in (True, False))
        raise ValueError(
            f"a task begins all of its sums or continues all of them; a task of {codelet!r} would continue {begun} and begin {fresh}; "
            "write zeros to the latter first, or submit a task for each sum"
        )

    @abc.abstractmethod
    def _lane_of(self, handle: Handle, number: int) -> Handle:
        """Create a new lane of a handle."""

    def _overwrite(self, handle: Handle) -> None:
        """Note that a task writes the handle; its lanes are dropped without being combined."""
        handle.written = True
        if handle.lanes is not None:
            self._drop_lanes(handle)

    def _drop_lanes(self, handle: Handle) -> None:
        handle.lanes = None
        self._summing.discard(handle)

    def _contribute(self, handle: Handle) -> tuple[Handle, Mode, bool]:
        """Return the lane, the mode and whether to accumulate, for the next REDUX contribution to `handle`."""
        lane = handle
        if self.lanes > 1:
            if handle.lanes is None:
                handle.lanes = {}
                handle.num_contributions = 0
                self._summing.add(handle)
            number, known = self._next_lane(handle)
            handle.num_contributions += current_contribution() is None
            lane = handle.lanes[number] = known or self._lane_of(handle, number)
        accumulate = lane.written
        lane.written = True
        return lane, RW if accumulate else W, accumulate

    def partial_sums(self, handle: Handle, num_lanes: int, *, priority: int = 0) -> dict[int, Handle]:
        """Sum the lanes of a handle as far as the tree of `num_lanes` lanes allows while other lanes are elsewhere, and detach the sums.

        Returns:
            Partial sums by their first lane; the first is the handle itself. `add_partial_sum` attaches partial sums again.

        Raises:
            ValueError, DoesNotFit: as in `_combine`.
        """
        lanes = handle.lanes or {0: handle}
        here = set(lanes)
        self._sum(handle, lanes, [(a, b) for a, b, end in tree(num_lanes) if here.issuperset(range(a, end))], priority)
        self._drop_lanes(handle)
        return dict(sorted(lanes.items()))

    def add_partial_sum(self, handle: Handle, lane: int, partial: Handle) -> None:
        """Attach a partial sum to a handle as the given lane of the tree; the next access combines all lanes."""
        if handle.lanes is None:
            handle.lanes = {}
            self._summing.add(handle)
        handle.lanes[lane] = partial

    def _combine(self, handle: Handle, priority: int = 0) -> None:
        """Combine the lanes into the handle in a fixed tree, with the priority of the task that needs the sum. If it raises, the lanes are unchanged.

        Raises:
            ValueError: the handle has no combine codelet, or no worker can run it.
            DoesNotFit: two lanes exceed every memory.
        """
        lanes = handle.lanes or {0: handle}
        self._sum(handle, lanes, [(a, b) for a, b, _ in tree(max(lanes) + 1)], priority)
        self._drop_lanes(handle)

    def _sum(self, handle: Handle, lanes: dict[int, Handle], pairs: Sequence[tuple[int, int]], priority: int) -> None:
        """Submit some additions of the tree; an absent lane adds nothing. The sum that includes the handle's own contribution stays in the handle."""
        if len(lanes) < 2:
            return
        if handle.combine is None:
            raise ValueError(f"{handle!r} was summed in {len(lanes)} lanes but has no combine codelet; pass one")
        first, second, *_ = lanes.values()
        terms = (*self._examine(handle.combine, [(first, RW), (second, R)], combines=True), None)
        for a, b in pairs:
            other, total = lanes.pop(b, None), lanes.get(a)
            if other is None:
                continue
            if total is not None:
                if other is handle:  # a + b and b + a are bit-identical
                    other, total = total, other
                self._submit(handle.combine, [(total, RW), (other, R)], {}, priority, terms)
            lanes[a] = total or other

    def _combine_all(self) -> None:
        """Combine the lanes of all handles: a recorded step neither begins nor ends with partial sums."""
        for handle in sorted(self._summing, key=lambda handle: handle.name):
            self._combine(handle)


def tree(num_lanes: int) -> Iterator[tuple[int, int, int]]:
    """Return the additions of the fixed tree: (a, b, end) means that lane a receives lane b and then holds lanes a to end - 1."""
    stride = 1
    while stride < num_lanes:
        for first in range(0, num_lanes - stride, 2 * stride):
            yield first, first + stride, min(first + 2 * stride, num_lanes)
        stride *= 2
