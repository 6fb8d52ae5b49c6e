"""The interface of every runtime for programs: handles, `submit`, `acquire`, `wait`.

A handle can be attached to a source in a file. The source is read whenever a task needs the data and no memory has it, until a task writes the
handle. `lanes` has the handles, and the sums of mode REDUX.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..core.codelet import Codelet
from ..core.memory.extents import rounded
from ..core.records import REDUX, RW, SCRATCH, Condition, DataClass, HandleSpec, Kind, Mode, R, W
from ..drivers.disk import Source
from .labels import current_label, labelled
from .lanes import Access, Handle, LaneSums, View


class TaskRuntime(LaneSums):
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
        super().__init__(lanes)
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
            ValueError: a handle appears twice, no worker can run the codelet, the condition does not match the accesses, or the task would begin one
                sum and continue another.
        """
        if len(dict(accesses)) != len(accesses):
            names = ", ".join(f"{mode} {handle.name or 'unnamed'}" for handle, mode in accesses)
            raise ValueError(f"{codelet!r} was submitted with the same handle twice ({names}); access it once, with mode RW if it is written")
        kinds, pin = self._examine(codelet, accesses)
        sums = [handle for handle, mode in accesses if mode == REDUX]
        uneven = self._uneven_sums(codelet, sums) if len(sums) > 1 else ()
        if condition is not None or self._has_flags:
            self._note_flags(codelet, accesses, condition)
        if self.lanes > 1:  # else there is nothing to sum
            for handle, mode in accesses:
                if handle.lanes is not None and (mode == R or mode == RW or handle in uneven):
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

    def _lane_of(self, handle: Handle, number: int) -> Handle:
        """Create a new lane of a handle."""
        name = f"{handle.name} lane {number}"
        return self.handle(handle.nbytes, handle.view, name=name, data_class=handle.spec.data_class, combine=handle.combine)

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
