"""Tasks for tests of the core that submit them by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.core.records import HandleRecord, Mode, Task, TaskId, TaskSpec, WorkerKind


def plain_task(
    number: int,
    name: str,
    kinds: tuple[WorkerKind, ...],
    accesses: Sequence[tuple[HandleRecord, Mode]] = (),
    constants: Mapping[str, object] | None = None,
    priority: int = 0,
    *,
    codelet: object = None,
    **run: Any,
) -> Task:
    """Return a task and its own specification; `run` has other fields of `Task`."""
    spec = TaskSpec(codelet, name, kinds, tuple(accesses), constants or {}, priority)
    return Task(TaskId(number), spec, spec.accesses, **run)
