"""Dependencies between tasks: edges that follow from access modes in submission order.

The rule (sequential consistency): a reader waits for the last writer before it; a writer waits for the last writer and for all readers since.
A handle remembers only unfinished tasks, so the graph contains unfinished tasks alone. An edge may be added more than once, and counts each time.
This module does not know memory, replicas or workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from .records import SCRATCH, R, SharedUse, Task


def link(task: Task) -> None:
    """Add the edges into a newly submitted task, and register its accesses with its handles."""
    for handle, mode in task.accesses:
        if mode is R or mode == R:
            _wait_for_writer(task, handle.last_writer)
            handle.readers[task] = None
        elif mode != SCRATCH:
            if handle.readers:
                for reader in handle.readers:
                    _edge(reader, task)
                handle.readers = {}
            else:
                _wait_for_writer(task, handle.last_writer)
            handle.last_writer = task


def predecessors(task: Task) -> Iterator[Task]:
    """Return the unfinished tasks that `link` would make a task wait for."""
    for handle, mode in task.accesses:
        if mode not in (R, SCRATCH) and handle.readers:
            yield from handle.readers
        elif mode != SCRATCH and handle.last_writer is not None:
            yield handle.last_writer


def waiting_for(task: Task, turns: Iterable[Task] = ()) -> set[Task]:
    """Return all tasks that wait for an unfinished task, directly or through others.

    Args:
        turns: tasks each of which waits for the one before it as well (`Dispatch.turns`).
    """
    waiting, stack, next_turn = set[Task](), [task], dict(pairwise(turns))
    while stack:
        before = stack.pop()
        for after in chain(before.successors, before.late_successors, [next_turn[before]] if before in next_turn else ()):
            if after not in waiting:
                waiting.add(after)
                stack.append(after)
    return waiting


def unlink(task: Task) -> None:
    """Remove the accesses of a finished task from its handles."""
    for handle, mode in task.accesses:
        if mode is R or mode == R:
            handle.readers.pop(task, None)
        elif handle.last_writer is task:
            handle.last_writer = None


def link_step(uses: Sequence[SharedUse]) -> None:
    """Order a replay after all unfinished tasks that use the handles it shares with the rest of the program."""
    for use in uses:
        handle, writer = use.handle, use.last_writer
        if writer is None and handle.last_writer is None:  # hot path: weights that are only read
            for reader in use.first_readers:
                handle.readers[reader] = None
            continue
        if handle.last_writer is not None:
            for reader in use.first_readers:
                _edge(handle.last_writer, reader)
            if use.first_writer is not None and not handle.readers:
                _edge(handle.last_writer, use.first_writer)
        if use.first_writer is None:
            for reader in use.first_readers:
                handle.readers[reader] = None
            continue
        for reader in handle.readers:
            _edge(reader, use.first_writer)
        handle.last_writer = writer
        handle.readers = dict.fromkeys(use.last_readers)


def _wait_for_writer(task: Task, writer: Task | None) -> None:
    if writer is not None:
        _edge(writer, task)


def _edge(before: Task, after: Task) -> None:
    """Add an edge. The successors of a recorded task are fixed, so edges out of its replay go to a list that is dropped with the replay."""
    if before.step is None:
        before.successors.append(after)
    elif isinstance(before.late_successors, list):
        before.late_successors.append(after)
    else:
        before.late_successors = [after]
    after.num_waiting += 1
