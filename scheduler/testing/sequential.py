"""The sequential reference: the results of a program's tasks when they run one after another in submission order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ..core.errors import DoesNotFit, SchedulerError, TierFailed
from ..core.records import RW, SCRATCH, HandleRecord, Mode, R, Task, W

MASK: Final = (1 << 64) - 1


class Wrong(AssertionError):
    """The machine violated a rule."""


def mix(salt: int, inputs: Iterable[int]) -> int:
    """Return the result of a fake kernel: a number that depends on every input and on their order."""
    value = (salt * 0x9E3779B97F4A7C15 + 1) & MASK
    for number in inputs:
        value = ((value ^ number) * 0x100000001B3 + 0x9E37) & MASK
    return value


@dataclass(slots=True, eq=False)
class Run:
    """One task as the program submitted it, in submission order, and its outcome.

    Attributes:
        task: the task.
        accesses: its handles and modes.
        salt: number that distinguishes the results of this task.
        replay: number of the replay among all that were started; None for a plain task.
        error: error of the task; None without one.
        started: whether it began to run.
        ended: whether it has finished, failed or been cancelled.
        before: inputs that it read when it began.
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
    """Run tasks one after another in submission order; return the final number of each handle, or the reason why it is lost.

    Original failures come from the runs (a kernel raised, the task did not fit, or the disk was full). The function checks that other tasks were
    cancelled exactly when they would have read lost data, and that every task that ran read the right inputs.

    If a task of a replay was cancelled, its outputs are lost for the rest of the replay. For all other tasks an output keeps its old value, if the
    replay was to read it before writing it and no task of the replay had begun to write it.

    Args:
        runs: tasks in submission order.
        unreadable: handles that a disk failed to read at some time; tasks that read them may or may not have been cancelled.
        files: numbers of the handles whose data is in files at the start.

    Raises:
        Wrong: a task ran, or read something, or was cancelled, that should not have.
    """
    values: dict[HandleRecord, int | str] = dict(files)
    untouched: dict[tuple[int, HandleRecord], bool] = {}  # by replay: whether a handle still has its old value, which the replay reads first
    stale: set[tuple[int, HandleRecord]] = set()
    for run in runs:
        inputs = [_input(values, stale, run.replay, handle) for handle, mode in run.accesses if mode == R or mode == RW]
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
                stale.add(use)
                continue
            untouched[use] = False
            stale.discard(use)
            values[handle] = str(run.error) if run.error is not None else mix(run.salt + position, known)
    return values


def _input(
    values: Mapping[HandleRecord, int | str], stale: Collection[tuple[int, HandleRecord]], replay: int | None, handle: HandleRecord
) -> int | str:
    """Return the number that a task of a replay reads from a handle, or the reason why there is none."""
    return "it has missed an update" if replay is not None and (replay, handle) in stale else values.get(handle, "nothing has written it")
