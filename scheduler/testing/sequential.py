"""The sequential truth: what a program's tasks leave behind when they run one after another in submission order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ..core.errors import DoesNotFit, SchedulerError, TierFailed
from ..core.records import RW, SCRATCH, HandleRecord, Mode, R, Task, W

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
    """One task as the program submitted it, in submission order, and how it ended.

    Attributes:
        replay: number of the replay among all that were started; None for a plain task.
        started: whether it began to run.
    """

    task: Task
    accesses: tuple[tuple[HandleRecord, Mode], ...]
    salt: int
    replay: int | None = None
    error: BaseException | None = None
    started: bool = False
    ended: bool = False
    before: list[int] = field(default_factory=list)


def truth(
    runs: Sequence[Run], unreadable: Collection[HandleRecord] = (), files: Mapping[HandleRecord, int] = MappingProxyType({})
) -> dict[HandleRecord, int | str]:
    """Run tasks one after another in submission order: what each handle holds at the end, or why it is lost.

    Root failures are taken from the runs (a kernel raised, the task did not fit, or the disk took no more); that the others were cancelled exactly
    when they read lost data is checked, and that those that ran read what they should have.

    What a task of a replay did not write because it was cancelled is lost to the rest of the replay, and to all others what it was, if the replay was
    to read it before writing it and no task of the replay had begun to write it.

    Args:
        runs: in submission order.
        unreadable: handles that a disk failed to give back at some time: their readers may or may not have been cancelled.
        files: what handles hold at the beginning.

    Raises:
        Wrong: a task ran, or read something, or was cancelled, that should not have.
    """
    values: dict[HandleRecord, int | str] = dict(files)
    untouched: dict[tuple[int, HandleRecord], bool] = {}  # by replay: whether what it uses still is what was there before, and was to be read first
    behind: set[tuple[int, HandleRecord]] = set()
    for run in runs:
        inputs = [_input(values, behind, run.replay, handle) for handle, mode in run.accesses if mode == R or mode == RW]
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
            use = (-1 if run.replay is None else run.replay, handle)
            is_untouched = untouched.setdefault(use, run.replay is not None and mode != W)
            if mode == R or mode == SCRATCH:
                continue
            if run.error is not None and not run.started and is_untouched and isinstance(values.get(handle), int):
                behind.add(use)
                continue
            untouched[use] = False
            behind.discard(use)
            values[handle] = str(run.error) if run.error is not None else mix(run.salt + position, known)
    return values


def _input(
    values: Mapping[HandleRecord, int | str], behind: Collection[tuple[int, HandleRecord]], replay: int | None, handle: HandleRecord
) -> int | str:
    """What a task of a replay finds in a handle, or why it finds nothing."""
    return "it has missed an update" if replay is not None and (replay, handle) in behind else values.get(handle, "nothing has written it")
