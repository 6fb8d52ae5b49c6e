"""The sequential truth: what a program's tasks leave behind when they run one after another in submission order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ..core.errors import DoesNotFit, SchedulerError, TierFailed
from ..core.records import RW, SCRATCH, HandleRecord, Mode, R, Task

MASK: Final = (1 << 64) - 1


class Wrong(AssertionError):
    """The machine did something it must not do."""


def mix(salt: int, inputs: Iterable[int]) -> int:
    """What a fake kernel computes: a number that depends on every input and on their order."""
    value = (salt * 0x9E3779B97F4A7C15 + 1) & MASK
    for number in inputs:
        value = ((value ^ number) * 0x100000001B3 + 0x9E37) & MASK
    return value


@dataclass(slots=True, eq=False)
class Run:
    """One task as the program submitted it, in submission order, and how it ended."""

    task: Task
    accesses: tuple[tuple[HandleRecord, Mode], ...]
    salt: int
    error: BaseException | None = None
    ended: bool = False
    before: list[int] = field(default_factory=list)


def truth(
    runs: Sequence[Run], unreadable: Collection[HandleRecord] = (), files: Mapping[HandleRecord, int] = MappingProxyType({})
) -> dict[HandleRecord, int | str]:
    """Run tasks one after another in submission order: what each handle holds at the end, or why it is lost.

    Root failures are taken from the runs (a kernel raised, the task did not fit, or the disk took no more); that the others were cancelled exactly
    when they read lost data is checked, and that those that ran read what they should have.

    Args:
        runs: in submission order.
        unreadable: handles that a disk failed to give back at some time: their readers may or may not have been cancelled.
        files: what handles hold at the beginning.

    Raises:
        Wrong: a task ran, or read something, or was cancelled, that should not have.
    """
    values: dict[HandleRecord, int | str] = dict(files)
    for run in runs:
        inputs = [values.get(handle, "nothing has written it") for handle, mode in run.accesses if mode == R or mode == RW]
        known = [value for value in inputs if isinstance(value, int)]
        is_root = run.error is not None and (not isinstance(run.error, SchedulerError) or isinstance(run.error, DoesNotFit | TierFailed))
        is_root = is_root or any(handle in unreadable for handle, mode in run.accesses if mode == R or mode == RW)
        if len(known) < len(inputs) and run.error is None:
            raise Wrong(f"{run.task!r} read data that does not exist")
        if run.error is None and run.ended and run.before != known:
            raise Wrong(f"{run.task!r} read {run.before} instead of {known}")
        if len(known) == len(inputs) and run.error is not None and not is_root:
            raise Wrong(f"{run.task!r} was cancelled without a reason: {run.error}")
        for position, (handle, mode) in enumerate(run.accesses):
            if mode != R and mode != SCRATCH:
                values[handle] = str(run.error) if run.error is not None else mix(run.salt + position, known)
    return values
