"""A trace of tasks and copies over time, in Chrome's JSON format, which Perfetto opens.

It has one track per worker and one per link. A skipped task is an instant on the track of the worker that ran its last predecessor. Arrows lead from
copies to the tasks they serve, and from tasks to the write-backs of their results.
Counters show the bytes of each node and the ready tasks. ``otherData`` has the format version and facts about the program; a task of a recorded step
may name its step. A name that ends in ``.gz`` is compressed.

Threads append events while the program runs, each with a single call, since no lock guards more than one. Events become JSON when the file is
written. Tasks, the most frequent events, lie in one flat list: a tuple per task would cost more, and the garbage collector would visit it repeatedly.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from ..core.records import FILE, FILE_NAME, HandleRecord, Mode

TRACE_FORMAT: Final = 1
"""Version of the format: events with their arguments, and ``otherData``."""

COUNTER_NS: Final = 50_000
"""Shortest time between two samples of the counters, nanoseconds."""

SKIPPED: Final = -1
"""Node of a skipped task, which runs nowhere."""

_LAST: Final = 1 << 60
"""A number larger than that of any worker."""

Accesses = Sequence[tuple[HandleRecord, Mode]]
Ran = tuple[int, str, int, int, int, int, Accesses]
"""Arguments of `Trace.add_task`."""

_WIDTH: Final = 7
"""Number of entries in the flat list per task."""


class Trace:
    """A collection of events, which grows while `active`.

    Attributes:
        counters_at_ns: time of the next sample of the counters, nanoseconds.
    """

    def __init__(self, *, active: bool = True) -> None:
        self.active = active
        self.counters_at_ns = 0
        self._tasks: list[Any] = []  # the fields of all `Ran`, one task after another
        self._copies: list[tuple[int, int, str, int, int, int, int]] = []
        self._counters: list[tuple[int, list[int], int]] = []

    def add_task(self, worker: int, name: str, task: int, start_ns: int, end_ns: int, node: int, accesses: Accesses) -> None:
        """Add a kernel that ran on a worker, over data on the worker's node."""
        self._tasks.extend((worker, name, task, start_ns, end_ns, node, accesses))

    def add_skip(self, worker: int, name: str, task: int, at_ns: int) -> None:
        """Add a conditional task that was skipped when a worker had ended its last predecessor."""
        self._tasks.extend((worker, name, task, at_ns, at_ns, SKIPPED, ()))

    def tasks(self) -> Iterator[Ran]:
        """Return every kernel that ran and every skipped task, in the order of the arguments of `add_task`."""
        fields = iter(self._tasks)
        return zip(*[fields] * _WIDTH, strict=True)

    def add_copy(self, source: int, target: int, name: str, nbytes: int, start_ns: int, end_ns: int, handle: int) -> None:
        """Add a copy of a handle's bytes between nodes."""
        self._copies.append((source, target, name, nbytes, start_ns, end_ns, handle))

    def add_counters(self, at_ns: int, used: list[int], num_ready: int) -> None:
        """Add a sample of the bytes in use per node and of the number of ready tasks."""
        self.counters_at_ns = at_ns + COUNTER_NS
        self._counters.append((at_ns, used, num_ready))

    def write(
        self,
        path: str | Path,
        workers: Mapping[int, str],
        nodes: Sequence[str],
        *,
        steps: Sequence[int | None] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the trace.

        Args:
            path: file to write.
            workers: name of each worker.
            nodes: name of each memory node.
            steps: for each of `tasks`, the step it belongs to, or None; None for no steps.
            about: further facts for ``otherData``, as JSON.
        """
        other = {"nntask": {"format": TRACE_FORMAT, **(about or {})}}
        document = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": list(self._events(workers, nodes, steps))}
        text = json.dumps(document, separators=(",", ":")).encode()
        path = Path(path)
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)

    def _events(self, workers: Mapping[int, str], nodes: Sequence[str], steps: Sequence[int | None] | None) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "workers"}}
        yield {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "links"}}
        for worker, name in workers.items():
            yield {"ph": "M", "pid": 1, "tid": worker, "name": "thread_name", "args": {"name": name}}
        links = sorted({(source, target) for source, target, *_ in self._copies})
        for number, (source, target) in enumerate(links):
            name = f"{FILE_NAME if source == FILE else nodes[source]}->{nodes[target]}"
            yield {"ph": "M", "pid": 2, "tid": number, "name": "thread_name", "args": {"name": name}}
        for (worker, name, task, start, end, node_id, _), step in zip(self.tasks(), steps or repeat(None), strict=False):
            about = {"task": task} if step is None else {"task": task, "step": step}
            if node_id == SKIPPED:
                yield {"ph": "i", "s": "t", "pid": 1, "tid": worker, "name": f"{name} skipped", "ts": start / 1e3, "args": about}
            else:
                yield {"ph": "X", "pid": 1, "tid": worker, "name": name, "ts": start / 1e3, "dur": (end - start) / 1e3, "args": about}
        for source, target, name, nbytes, start, end, _ in self._copies:
            track = links.index((source, target))
            yield {
                "ph": "X",
                "pid": 2,
                "tid": track,
                "name": name,
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                "args": {"bytes": nbytes},
            }
        yield from self._arrows(links)
        for sampled, used, num_ready in self._counters:
            for node, nbytes in zip(nodes, used, strict=True):
                yield {"ph": "C", "pid": 1, "name": f"bytes {node}", "ts": sampled / 1e3, "args": {"bytes": nbytes}}
            yield {"ph": "C", "pid": 1, "name": "ready tasks", "ts": sampled / 1e3, "args": {"tasks": num_ready}}

    def _arrows(self, links: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        """Return an arrow for each copy: to the first task that uses the copied data, or else (a write-back) from the last task that wrote it."""
        starts: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (node, handle) -> (start, worker) of tasks
        ends: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (node, handle) -> (end, worker) of tasks
        for worker, _, _, start, end, node, accesses in self.tasks():
            for record, _ in accesses:
                starts.setdefault((node, record.id), []).append((start, worker))
                ends.setdefault((node, record.id), []).append((end, worker))
        arrivals: dict[tuple[int, int], list[int]] = {}
        for _, target, _, _, _, end, handle in self._copies:
            arrivals.setdefault((target, handle), []).append(end)
        for moments in (*starts.values(), *ends.values()):
            moments.sort()
        for times in arrivals.values():
            times.sort()
        for number, (source, target, name, _, begin, end, handle) in enumerate(self._copies):
            arrow = {"cat": "copy", "name": name, "id": number}
            link = {"pid": 2, "tid": links.index((source, target))}
            uses, users, copies = starts.get((target, handle), []), ends.get((source, handle), []), arrivals[target, handle]
            first_use, last, next_time = bisect_left(uses, (end, -1)), bisect_right(users, (begin, _LAST)) - 1, bisect_right(copies, end)
            if first_use < len(uses) and not (next_time < len(copies) and copies[next_time] <= uses[first_use][0]):  # else dropped before its use
                start, worker = uses[first_use]
                yield {"ph": "s", **link, "ts": end / 1e3, **arrow}
                yield {"ph": "f", "bp": "e", "pid": 1, "tid": worker, "ts": start / 1e3, **arrow}
            elif last >= 0:
                written, worker = users[last]
                yield {"ph": "s", "pid": 1, "tid": worker, "ts": written / 1e3, **arrow}
                yield {"ph": "f", "bp": "e", **link, "ts": begin / 1e3, **arrow}
