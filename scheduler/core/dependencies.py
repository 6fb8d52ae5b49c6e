"""Which task waits for which: edges that follow from access modes in submission order.

The rule (sequential consistency): a reader waits for the last writer before it; a writer waits for the last writer and for all readers since.
A handle remembers only unfinished tasks, so the graph never grows beyond what is in flight. Edges may be doubled; they count as often as they
are added. Knows nothing of memory, replicas or workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from .records import SCRATCH, R, SharedUse, Task


def link(task: Task) -> None:
    """Add the edges into a newly submitted task and enter it as an access of its handles."""
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
    """The unfinished tasks that `link` would let a task wait for."""
    for handle, mode in task.accesses:
        if mode not in (R, SCRATCH) and handle.readers:
            yield from handle.readers
        elif mode != SCRATCH and handle.last_writer is not None:
            yield handle.last_writer


def waiting_for(task: Task) -> set[Task]:
    """All tasks that wait for an unfinished one, directly or through others."""
    found, stack = set[Task](), [task]
    while stack:
        each = stack.pop()
        for after in chain(each.successors, each.late_successors):
            if after not in found:
                found.add(after)
                stack.append(after)
    return found


def unlink(task: Task) -> None:
    """Forget a finished task as an access of its handles."""
    for handle, mode in task.accesses:
        if mode is R or mode == R:
            handle.readers.pop(task, None)
        elif handle.last_writer is task:
            handle.last_writer = None


def link_step(uses: Sequence[SharedUse]) -> None:
    """Order a whole replay after whatever still uses the handles it shares with the rest of the program."""
    for use in uses:
        handle, writer = use.handle, use.last_writer
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
    """A recorded task's own successors are fixed; edges out of its replay go to a list that dies with the replay."""
    (before.successors if before.step is None else before.late_successors).append(after)
    after.num_waiting += 1
