"""The interface of every runtime for programs (handles, `submit`, `acquire`, `wait`), and the rewriting of REDUX to plain accesses.

REDUX is rewritten here, before any scheduler sees it. A handle has L *lanes*, which are partial accumulators. Contribution *i* goes to lane *i mod
L*; the first lane with a contribution is the handle itself. Contributions are counted, or numbered by the program (`contribution`), so that other
processes may compute some of them. The first kernel that writes a lane gets ``accumulate=False``, so no task clears memory first. The next access
with another mode first combines the lanes in a fixed tree: lane j receives lane j + s for s = 1, 2, 4, ... The tree depends on submission order and
L alone, never on workers or time, so results are bit-identical on any machine.

A handle can be attached to a source in a file. The source is read whenever a task needs the data and no memory has it, until a task writes the
handle.
"""

from __future__ import annotations

import abc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from ..core.codelet import Codelet
from ..core.memory.extents import rounded
from ..core.records import REDUX, RW, SCRATCH, Condition, DataClass, HandleSpec, Kind, Mode, R, W, WorkerId, WorkerKind
from ..drivers.disk import Source
from .labels import current_contribution, current_label, labelled

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


class TaskRuntime(abc.ABC):
    """Interface between tile operations and the execution of tasks.

    Guarantee: tasks appear to run one after another in submission order.

    Args:
        lanes: L, the number of partial accumulators of REDUX; a property of the numerics, like a tile size.

    Attributes:
        has_gpus: whether there are CUDA workers, which then run every codelet that has an implementation for them.
        inbox: receives the records of released handles; None if they need no care.
    """

    has_gpus = False
    inbox: deque[Any] | None = None

    def __init__(self, lanes: int = 1) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}; use --lanes 1 for plain sums")
        self.lanes = lanes
        self._summing: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._note_handle: Callable[[Handle], None] | None = None  # called with each new handle while a step is recorded
        self._num_blocks = 0
        self._has_flags = False  # whether any task has written flags

    def handle(
        self,
        nbytes: int,
        view: View,
        *,
        name: str = "",
        kind: Kind = "temporary",
        data_class: DataClass = "activations",
        combine: Codelet | None = None,
    ) -> Handle:
        """Register data of `nbytes` bytes; memory is allocated when the first task writes it, in an `InlineRuntime` at once."""
        spec = HandleSpec(nbytes, rounded(nbytes), view, name, kind, data_class)
        handle = Handle(self._record(spec), spec, combine, self.inbox)
        if self._note_handle is not None:
            self._note_handle(handle)
        return handle

    @abc.abstractmethod
    def _record(self, spec: HandleSpec) -> Any:
        """Return the runtime's own record of new data."""

    def attach(self, handle: Handle, source: Source) -> None:
        """Declare that the data of a handle is in `source`, which is read whenever a task needs the data and no memory has it.

        This ends when a task writes the handle. Until then the data takes memory only while it is used or memory is free. The present data of the
        handle counts as overwritten.

        Raises:
            ValueError: an unfinished task uses the handle, or a step with the handle has been replayed (a step that was only recorded is no
                obstacle).
            DoesNotFit: the buffers that read the source do not fit, even if droppable data is evicted.
            RecordingError: a step is being recorded.
        """
        self._attach(handle, source)
        self._overwrite(handle)

    @abc.abstractmethod
    def _attach(self, handle: Handle, source: Source) -> None:
        """Note the source of a handle."""

    @abc.abstractmethod
    def acquire(self, handle: Handle, mode: Mode, *, is_shared: bool = False) -> AbstractContextManager[Any]:
        """Wait for the handle's data in host memory, and lock it there for the block: ``with runtime.acquire(h, "R") as view``."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until every submitted task is done.

        Raises:
            TaskError: a task failed since the last wait.
        """

    @property
    @abc.abstractmethod
    def recording(self) -> bool:
        """Whether tasks are being captured instead of run."""

    @abc.abstractmethod
    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Eligible:
        """Return the workers that may run a task; refuse a task that no worker can run, before any state has changed.

        Args:
            combines: whether the task combines lanes: it then belongs to earlier submissions, and is not pinned.
        """

    @abc.abstractmethod
    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        """Take one examined task, whose modes are R, W, RW and SCRATCH."""

    def submit(
        self,
        codelet: Codelet,
        accesses: Sequence[Access],
        constants: Mapping[str, Any] | None = None,
        *,
        priority: int = 0,
        condition: Condition | None = None,
    ) -> None:
        """Submit a task: `codelet` over `accesses`.

        Args:
            accesses: (handle, mode) pairs in the order of the kernel's arguments; a handle may appear once.
            constants: keyword arguments of the kernel.
            priority: tasks of larger priority run earlier among ready tasks, under policies that use priorities.
            condition: the flag on which the task depends, or the flags that it writes for later tasks; None for neither. A task that begins a sum,
                with mode REDUX, runs whatever its flag is; its kernel then writes zeros for a flag of 0.

        Raises:
            ValueError: a handle appears twice, no worker can run the codelet, or the condition does not match the accesses.
        """
        if len(dict(accesses)) != len(accesses):
            names = ", ".join(f"{mode} {handle.name or 'unnamed'}" for handle, mode in accesses)
            raise ValueError(f"{codelet!r} was submitted with the same handle twice ({names}); access it once, with mode RW if it is written")
        kinds, pin = self._examine(codelet, accesses)
        if condition is not None or self._has_flags:
            self._note_flags(codelet, accesses, condition)
        if self.lanes > 1:  # else there is nothing to sum
            for handle, mode in accesses:
                if handle.lanes is not None and (mode == R or mode == RW):
                    self._combine(handle, priority)
        plain: list[Access] = []
        for access in accesses:
            handle, mode = access
            if mode == REDUX:
                handle, mode, accumulate = self._contribute(handle)
                access, constants = (handle, mode), {**(constants or {}), "accumulate": accumulate}
                if condition is not None and not accumulate:
                    condition = None if condition.flags < 0 else condition._replace(guard=-1, share=1.0)
            elif mode != R and mode != SCRATCH:
                self._overwrite(handle)
            plain.append(access)
        self._submit(codelet, plain, constants or {}, priority, (kinds, pin, condition))

    def _note_flags(self, codelet: Codelet, accesses: Sequence[Access], condition: Condition | None) -> None:
        """Note the flags that a task writes.

        Raises:
            ValueError: the condition does not match the accesses, or the task reads or writes flags without it.
        """
        flags = -1 if condition is None else condition.flags
        if condition is not None:
            _check_condition(codelet, accesses, condition)
            if condition.guard >= 0 and not (guard := accesses[condition.guard][0]).has_flags:
                raise ValueError(
                    f"{codelet!r} depends on {guard!r}, to which no task has written flags; submit a task with Condition(flags=...) first"
                )
        for position, (handle, mode) in enumerate(accesses):
            if handle.has_flags and mode not in (R, SCRATCH) and position != flags:
                raise _has_other_writers(handle)
        if flags >= 0:
            self._has_flags = accesses[flags][0].has_flags = True

    @contextmanager
    def block(self) -> Iterator[None]:
        """Group the tasks recorded inside the ``with`` block into one block of a model, such as a layer.

        If a step is planned with ``recompute="block"``, the results of these tasks are recomputed in the backward pass from the data that the block
        reads. Of nested blocks, only the outermost counts.
        """
        if current_label().block is not None:
            yield
            return
        self._num_blocks += 1
        with labelled(block=self._num_blocks):
            yield

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
            number = current_contribution()
            if number is None:
                number = handle.num_contributions
                handle.num_contributions += 1
            number %= self.lanes
            known = handle.lanes.get(number)
            lane = handle.lanes[number] = known or (self._lane_of(handle, number) if handle.lanes else handle)
        accumulate = lane.written
        lane.written = True
        return lane, RW if accumulate else W, accumulate

    def _lane_of(self, handle: Handle, number: int) -> Handle:
        """Create a new lane of a handle."""
        name = f"{handle.name} lane {number}"
        return self.handle(handle.nbytes, handle.view, name=name, data_class=handle.spec.data_class, combine=handle.combine)

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

    def _make_whole(self, handle: Handle, mode: Mode) -> None:
        """Combine the lanes of a handle before the program uses its data, or drop them if the program overwrites the data.

        Raises:
            ValueError: the program would write flags.
        """
        if handle.has_flags and mode != R:
            raise _has_other_writers(handle)
        if handle.lanes is not None and (mode == R or mode == RW):
            self._combine(handle)
        if mode != R and mode != SCRATCH:
            self._overwrite(handle)

    def _combine_all(self) -> None:
        """Combine the lanes of all handles: a recorded step neither begins nor ends with partial sums."""
        for handle in sorted(self._summing, key=lambda handle: handle.name):
            self._combine(handle)


def _has_other_writers(handle: Handle) -> ValueError:
    """Return the error for a task or a program that would write flags."""
    return ValueError(f"{handle!r} has flags of conditional tasks, so only tasks with Condition(flags=...) may write it; use other data")


def _check_condition(codelet: Codelet, accesses: Sequence[Access], condition: Condition) -> None:
    """Raise `ValueError` unless the condition of a task matches its accesses."""
    modes = [mode for _, mode in accesses]
    for data, position, allowed in (("the flag that it reads", condition.guard, (R,)), ("the flags that it writes", condition.flags, (W, RW))):
        if position >= 0 and (position >= len(modes) or modes[position] not in allowed):
            mode = modes[position] if position < len(modes) else "none"
            raise ValueError(
                f"access {position} of {codelet!r}, which has {data}, must exist with mode {' or '.join(allowed)}, got {mode}; name another one"
            )
    if condition.guard < 0:
        return
    num_flags = accesses[condition.guard][0].nbytes
    if not 0 <= condition.number < num_flags:
        raise ValueError(f"{codelet!r} depends on a flag of {num_flags}, numbered from 0, got number {condition.number}; correct the condition")
    if codelet.host is not None:
        raise ValueError(f"{codelet!r} depends on a flag, so it must run on a worker, got a host operation; submit it without a condition")


def tree(num_lanes: int) -> Iterator[tuple[int, int, int]]:
    """Return the additions of the fixed tree: (a, b, end) means that lane a receives lane b and then holds lanes a to end - 1."""
    stride = 1
    while stride < num_lanes:
        for first in range(0, num_lanes - stride, 2 * stride):
            yield first, first + stride, min(first + 2 * stride, num_lanes)
        stride *= 2
