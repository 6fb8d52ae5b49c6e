"""The sequential reference: the results of a program's tasks when they run one after another in submission order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ..core.errors import DoesNotFit, SchedulerError, TierFailed
from ..core.records import RW, SCRATCH, HandleRecord, Mode, R, Replica, Task, W

MASK: Final = (1 << 64) - 1


class Wrong(AssertionError):
    """The machine violated a rule."""


def mix(salt: int, inputs: Iterable[int]) -> int:
    """Return the result of a fake kernel: a number that depends on every input and on their order."""
    value = (salt * 0x9E3779B97F4A7C15 + 1) & MASK
    for number in inputs:
        value = ((value ^ number) * 0x100000001B3 + 0x9E37) & MASK
    return value


def flags_in(value: int) -> bytes:
    """Return the flags in the result of a fake kernel: its lowest eight bits."""
    return bytes(value >> index & 1 for index in range(8))


def flags_of(task: Task, load: Callable[[Replica], int]) -> bytes | None:
    """Return the flags that a task has written; None if it writes none. `load` returns the number in a replica."""
    condition = task.spec.condition
    return None if condition is None or condition.flags < 0 else flags_in(load(task.replicas[condition.flags]))


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
        if _is_skipped(run, values, stale):
            for handle, mode in run.accesses:
                untouched.setdefault((-1 if run.replay is None else run.replay, handle), run.replay is not None and mode != W)
                values.update({handle: "its task was skipped"} if mode == W else {})
            continue
        inputs = [_input(values, stale, run.replay, handle) for handle, mode in run.accesses if mode in (R, RW)]
        known = [value for value in inputs if isinstance(value, int)]
        is_root = run.error is not None and (not isinstance(run.error, SchedulerError) or isinstance(run.error, DoesNotFit | TierFailed))
        is_root = is_root or any(handle in unreadable for handle, mode in run.accesses if mode in (R, RW))
        if len(known) < len(inputs) and run.error is None:
            raise Wrong(f"{run.task!r} read data that does not exist")
        if run.error is None and run.ended and run.before != known:
            raise Wrong(f"{run.task!r} read {run.before} instead of {known}")
        if len(known) == len(inputs) and run.error is not None and not is_root:
            raise Wrong(f"{run.task!r} was cancelled without a reason: {run.error}")
        for position, (handle, mode) in enumerate(run.accesses):
            use = (-1 if run.replay is None else run.replay, handle)
            is_untouched = untouched.setdefault(use, run.replay is not None and mode != W)
            if mode in (R, SCRATCH):
                continue
            if run.error is not None and not run.started and is_untouched and isinstance(values.get(handle), int):
                stale.add(use)
                continue
            untouched[use] = False
            stale.discard(use)
            values[handle] = str(run.error) if run.error is not None else mix(run.salt + position, known)
    return values


def _is_skipped(run: Run, values: Mapping[HandleRecord, int | str], stale: Collection[tuple[int, HandleRecord]]) -> bool:
    """Return whether a run is that of a conditional task that was skipped because its flag is 0.

    A task whose flag would be 0 is cancelled instead if the flags are lost before the decision.

    Raises:
        Wrong: the task was skipped although its flag is not 0, or it ran although its flag is 0.
    """
    condition = run.task.spec.condition
    flags = None if condition is None or condition.guard < 0 else _input(values, stale, run.replay, run.accesses[condition.guard][0])
    is_excluded = condition is not None and isinstance(flags, int) and flags_in(flags)[condition.number] == 0
    was_skipped = run.ended and run.error is None and not run.started
    if is_excluded != was_skipped and not (is_excluded and run.error is not None):
        raise Wrong(f"{run.task!r} was {'not ' if is_excluded else ''}skipped, although its flags are {flags}")
    return was_skipped


def _input(
    values: Mapping[HandleRecord, int | str], stale: Collection[tuple[int, HandleRecord]], replay: int | None, handle: HandleRecord
) -> int | str:
    """Return the number that a task of a replay reads from a handle, or the reason why there is none."""
    return "it has missed an update" if replay is not None and (replay, handle) in stale else values.get(handle, "nothing has written it")


def check_results(
    runs: Sequence[Run], unreadable: Collection[HandleRecord], files: Mapping[HandleRecord, int], load: Callable[[Replica], int]
) -> None:
    """Compare the data of all handles that tasks used with the results of `truth`.

    Args:
        load: function that returns the number in a replica.

    Raises:
        Wrong: an outcome or a buffer differs.
    """
    values = truth(runs, unreadable, files)
    for handle in {handle for run in runs for handle, mode in run.accesses if mode != SCRATCH}:
        if handle.released:
            if handle.replicas:
                raise Wrong(f"{handle!r} was released but still has {handle.replicas}")
            continue
        expected = values.get(handle)
        if handle.lost is not None and handle in unreadable:
            continue
        if (handle.lost is not None) != isinstance(expected, str):
            raise Wrong(f"{handle!r}: lost is {handle.lost!r}, but it should hold {expected}")
        held = {replica.node: load(replica) for replica in handle.replicas.values() if replica.state != "reserved"}
        if isinstance(expected, int) and (not held or set(held.values()) != {expected}):
            raise Wrong(f"{handle!r} should hold {expected:#x} but the nodes hold {held}")
