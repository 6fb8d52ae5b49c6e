"""Errors of the scheduler are data: each has fields, a fact and a remedy, and its message is these two."""

from __future__ import annotations

from copy import copy
from typing import get_args

import pytest

from scheduler.core import errors
from scheduler.core.errors import (
    Deadlock,
    DeviceFailed,
    DoesNotFit,
    HandleLost,
    PlacementError,
    RunStopped,
    RuntimeBroken,
    SchedulerError,
    Stalled,
    TaskCause,
    TaskError,
    TierFailed,
)
from scheduler.core.shortage import AccessSize, Cause, Shortage

DATA = (AccessSize("R", "w", 4096), AccessSize("W", "y", 8192))

SHORTAGES = [
    (
        Shortage("task", "ram", 12288, 8192, task="plus", sizes=DATA, workers=("cpu", "sim")),
        "plus needs 12,288 B at once (R w 4,096 B, W y 8,192 B), more than the 8,192 B of the largest memory with workers of kind cpu or sim for it",
        "raise the budget or use smaller tiles or minibatches",
    ),
    (
        Shortage("task", "sim:0", 12288, 8192, task="plus", pin="sim:0"),
        "plus needs 12,288 B at once, more than the 8,192 B of sim:0, on which it was placed",
        "raise the budget, use smaller tiles or minibatches, or submit it outside place('sim:0')",
    ),
    (
        Shortage("task", "ram", 12288, 8192, task="plus", reading=4096),
        "plus needs 12,288 B at once, more than the 8,192 B of the largest memory with workers for it without the 4,096 B of "
        "RAM for readers of files",
        "raise the budget or use smaller tiles or minibatches",
    ),
    (
        Shortage("taken", "ram", 12288, 16384, 8192, "plus", DATA, hole=4096),
        "plus needs 12,288 B at once on node ram (R w 4,096 B, W y 8,192 B), but of its budget of 16,384 B 8,192 B are taken by data that has "
        "nowhere else to go and the largest hole is 4,096 B",
        "raise the budget or use smaller tiles or minibatches",
    ),
    (
        Shortage("full", "disk", 4096, 8192, 8192, "plus"),
        "node disk is full: plus makes 4,096 B of new data that must have room there, but of its budget of 8,192 B 8,192 B are taken",
        "raise the budget",
    ),
    (
        Shortage("full", "disk", 4096, 8192, 8192),
        "node disk is full: 4,096 B of new data that must have room there, but of its budget of 8,192 B 8,192 B are taken",
        "raise the budget",
    ),
    (
        Shortage("readers", "ram", 4096, 8192, 8192, sizes=(AccessSize("", "handle 1 'w'", 4096),)),
        "reading handle 1 'w' from its source takes 4,096 B of ram for its readers, but of its budget of 8,192 B 8,192 B are taken",
        "raise the budget, or attach sources before data is written",
    ),
    (
        Shortage("step", "ram", 12288, 8192),
        "the step needs 12,288 B of ram at least, more than its budget of 8,192 B",
        "raise the budget",
    ),
    (
        Shortage("idle", "sim:0", 12288, 8192),
        "the smallest task that computes needs 12,288 B, more than the 8,192 B of sim:0, which would stay idle",
        "raise the budget",
    ),
    (
        Shortage("reserve", "ram", 12288, 8192, sizes=(AccessSize("", "ram", 4096), AccessSize("", "sim:0", 8192))),
        "budgets of 12,288 B in total (ram 4,096 B, sim:0 8,192 B) are above the 8,192 B of memory that this process may use (limit of the machine "
        "or of its cgroup)",
        "lower it, and name a disk for the rest",
    ),
    (
        Shortage("reserve", "disk", 12288, 8192),
        "a budget of 12,288 B is above the 8,192 B of memory that disk has free",
        "lower it, and name a disk for the rest",
    ),
    (
        Shortage("outside", "GPU 0", 0, 8192, 4096, "a library"),
        "GPU 0 has no memory left for a library, which allocates outside the budget (4,096 of 8,192 bytes are free)",
        "lower the budget of the device, or end other programs that use the card",
    ),
    (
        Shortage("outside", "GPU 0", 0, 0, task="PyTorch", detail="CUDA out of memory"),
        "GPU 0 has no memory left for PyTorch, which allocates outside the budget (CUDA out of memory)",
        "lower the budget of the device, or end other programs that use the card",
    ),
]


@pytest.mark.parametrize(("shortage", "fact", "remedy"), SHORTAGES)
def test_each_shortage_has_its_sentence(shortage: Shortage, fact: str, remedy: str) -> None:
    """The fact has the rule and the values; the remedy is apart from it."""
    error = DoesNotFit(shortage)
    assert error.shortage is shortage
    assert shortage.free == shortage.budget - shortage.taken
    assert (error.fact, error.remedy) == (shortage.fact, shortage.remedy) == (fact, remedy)
    assert str(error) == f"{fact}; {remedy}"
    assert isinstance(error, MemoryError)


def test_each_cause_of_a_shortage_is_tested() -> None:
    """Above."""
    assert {shortage.cause for shortage, _, _ in SHORTAGES} == set(get_args(Cause))


def test_a_program_with_other_terms_says_so() -> None:
    """The facts stay, the sentences are its own."""
    error = DoesNotFit(SHORTAGES[0][0], "the graph is too large", "use smaller chunks")
    assert (error.fact, error.remedy, str(error)) == ("the graph is too large", "use smaller chunks", "the graph is too large; use smaller chunks")
    assert error.shortage.needed == 12288


ERRORS = [
    (
        TaskError("raised", "kernel 'f' (task 3) over R w", why="ZeroDivisionError: division by zero"),
        {"cause": "raised", "task": "kernel 'f' (task 3) over R w", "data": "", "why": "ZeroDivisionError: division by zero"},
        "kernel 'f' (task 3) over R w raised ZeroDivisionError: division by zero",
    ),
    (
        TaskError("unwritten", "task 3 f(R w)", data="handle 1 'w' (8 B)"),
        {"cause": "unwritten", "data": "handle 1 'w' (8 B)"},
        "task 3 f(R w) reads handle 1 'w' (8 B), which nothing has written; write it first",
    ),
    (
        TaskError("lost", "task 3 f(R w)", data="handle 1", why="task 2 failed"),
        {"cause": "lost", "data": "handle 1", "why": "task 2 failed"},
        "task 3 f(R w) was cancelled: it reads handle 1, which is lost because task 2 failed",
    ),
    (
        TaskError("unread", "task 3 f(R w)", data="handle 1", why="it could not be read back: planted"),
        {"cause": "unread"},
        "task 3 f(R w) was cancelled: it needs handle 1, and it could not be read back: planted",
    ),
    (HandleLost("handle 1"), {"data": "handle 1", "why": ""}, "handle 1 cannot be read: nothing has written it; write it first"),
    (HandleLost("handle 1", "task 2 failed"), {"why": "task 2 failed", "is_step": False}, "handle 1 cannot be read: task 2 failed"),
    (
        HandleLost("handle 1", "task 2 failed", is_step=True),
        {"is_step": True},
        "the step reads handle 1, which is lost because task 2 failed; restore or overwrite it first",
    ),
    (
        DoesNotFit(Shortage("step", "ram", 2, 1)),
        {"shortage": Shortage("step", "ram", 2, 1)},
        "the step needs 2 B of ram at least, more than its budget of 1 B; raise the budget",
    ),
    (
        TierFailed("handle 1", "scratch", "No space left on device", reads=False),
        {"data": "handle 1", "directory": "scratch", "why": "No space left on device", "reads": False},
        "handle 1 could not be written to the disk tier in scratch: No space left on device; free space there, choose another directory for the "
        "tier, or raise the budget of host memory",
    ),
    (
        TierFailed("handle 1", "scratch", "Input/output error", reads=True),
        {"reads": True},
        "handle 1 could not be read back from the disk tier in scratch: Input/output error; free space there, choose another directory for the "
        "tier, or raise the budget of host memory",
    ),
    (
        DeviceFailed("GPU 0", "cudaError 700"),
        {"device": "GPU 0", "why": "cudaError 700"},
        "GPU 0 stopped working: cudaError 700; continue from the last checkpoint, on another GPU or after a reset",
    ),
    (
        Deadlock("wait()", "handle 1"),
        {"call": "wait()", "data": "handle 1"},
        "wait() would deadlock: it waits for a task that waits for handle 1, which this thread holds; leave the block of its acquire() or borrow() "
        "first",
    ),
    (
        PlacementError("sim:1", workers=["cpu:0", "sim:0"]),
        {"worker": "sim:1", "codelet": "", "workers": ("cpu:0", "sim:0")},
        "place() takes the name of a worker of this runtime, got 'sim:1'; name one of cpu:0, sim:0",
    ),
    (
        PlacementError("sim:0", codelet="f", kinds=["cuda"]),
        {"worker": "sim:0", "codelet": "f", "kinds": ("cuda",)},
        "Codelet('f') was placed on sim:0 and runs on cuda; give it an implementation for sim workers, or submit it outside place('sim:0')",
    ),
    (
        RunStopped("task 3 f(R w)", "cpu:0", "ValueError: planted"),
        {"task": "task 3 f(R w)", "worker": "cpu:0", "why": "ValueError: planted"},
        "the callback of on_task stopped the run at task 3 f(R w) on cpu:0: ValueError: planted; every task submitted before runs to its end and its "
        "data can be read and saved; on_task(None), or another callback, lets the runtime take on new ones",
    ),
    (
        RuntimeBroken("SystemExit: 1", thread="cpu:0"),
        {"why": "SystemExit: 1", "thread": "cpu:0"},
        "the runtime broke in thread 'cpu:0': SystemExit: 1; create a new runtime",
    ),
    (
        RuntimeBroken("MemoryError: ", subject="the memory of Dask graphs"),
        {"thread": "", "subject": "the memory of Dask graphs"},
        "the memory of Dask graphs broke: MemoryError: ; create a new runtime",
    ),
    (
        Stalled(3, 1, ["cpu"], "lately:\n  nothing is remembered"),
        {"num_unfinished": 3, "num_ready": 1, "kinds": ("cpu",), "story": "lately:\n  nothing is remembered"},
        "3 tasks remain, 1 of them ready, but nothing runs or moves; workers are of kind cpu\nlately:\n  nothing is remembered",
    ),
]


@pytest.mark.parametrize(("error", "fields", "sentence"), ERRORS)
def test_each_error_has_fields_and_a_sentence(error: SchedulerError, fields: dict[str, object], sentence: str) -> None:
    """And a copy has them, too, without what caused the error."""
    error.__cause__ = ValueError("the kernel's")
    for each in (error, copy(error)):
        assert {name: getattr(each, name) for name in fields} == fields
        assert str(each) == sentence
        assert str(each).startswith(each.fact)
        assert not each.remedy or str(each) == f"{each.fact}; {each.remedy}"
    assert type(copy(error)) is type(error)
    assert copy(error).__cause__ is None


def test_each_class_and_cause_of_an_error_is_tested() -> None:
    """All but the base class and impossible events, whose message is a report of a bug."""
    classes = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SchedulerError)}
    assert {type(error) for error, _, _ in ERRORS} == classes - {SchedulerError, errors.InvalidEvent}
    assert {error.cause for error, _, _ in ERRORS if isinstance(error, TaskError)} == set(get_args(TaskCause))
    unread = {type(error): set(vars(error)) - {"fact", "remedy"} for error, _, _ in ERRORS}
    for error, fields, _ in ERRORS:
        unread[type(error)] -= fields.keys()
    assert not {kind: fields for kind, fields in unread.items() if fields}
