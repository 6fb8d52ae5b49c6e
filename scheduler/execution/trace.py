"""A trace of what ran when, in Chrome's JSON format, which Perfetto opens.

One track per worker, one per link, arrows from copies to the tasks they serve and from tasks to the write-backs of what they made, counters for the
bytes of each node and for ready tasks. What else is known of the program stands under ``otherData`` with the format of it all; a task of a recorded
step may say which. Threads append events while the program runs, each with one call, since nothing guards more than one; they are
turned into JSON when the file is written. What there are most of, tasks, stand in one flat list: it costs less than a tuple each, which the garbage
collector would visit again and again. A name that ends in ``.gz`` is compressed.
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
"""Of what is written: events and their arguments, and ``otherData``."""

COUNTER_NS: Final = 50_000
"""Counters are taken at most once in so many nanoseconds."""

_LAST: Final = 1 << 60
"""Above the number of any worker."""

Accesses = Sequence[tuple[HandleRecord, Mode]]
Ran = tuple[int, str, int, int, int, int, Accesses]
"""Arguments of `Trace.add_task`."""

_WIDTH: Final = 7
"""Entries of the flat list per task."""


class Trace:
    """Collects events while `active`.

    Attributes:
        counters_at_ns: when counters should be taken again, nanoseconds.
    """

    def __init__(self, *, active: bool = True) -> None:
        self.active = active
        self.counters_at_ns = 0
        self._tasks: list[Any] = []  # the fields of one `Ran` after those of the other
        self._copies: list[tuple[int, int, str, int, int, int, int]] = []
        self._counters: list[tuple[int, list[int], int]] = []

    def add_task(self, worker: int, name: str, task: int, start_ns: int, end_ns: int, node: int, accesses: Accesses) -> None:
        """A kernel ran on a worker, over data on the worker's node."""
        self._tasks.extend((worker, name, task, start_ns, end_ns, node, accesses))

    def tasks(self) -> Iterator[Ran]:
        """Every kernel that ran, as `add_task` took it."""
        fields = iter(self._tasks)
        return zip(*[fields] * _WIDTH, strict=True)

    def add_copy(self, source: int, target: int, name: str, nbytes: int, start_ns: int, end_ns: int, handle: int) -> None:
        """Bytes of a handle moved between nodes."""
        self._copies.append((source, target, name, nbytes, start_ns, end_ns, handle))

    def add_counters(self, at_ns: int, used: list[int], num_ready: int) -> None:
        """Bytes in use per node and tasks ready."""
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
            workers: name of each worker.
            nodes: name of each memory node.
            steps: of each of `tasks`, the step it belongs to, if any.
            about: what else is known, as JSON.
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
        for (worker, name, task, start, end, *_), step in zip(self.tasks(), steps or repeat(None), strict=False):
            about = {"task": task} if step is None else {"task": task, "step": step}
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
        for at, used, num_ready in self._counters:
            for node, nbytes in zip(nodes, used, strict=True):
                yield {"ph": "C", "pid": 1, "name": f"bytes {node}", "ts": at / 1e3, "args": {"bytes": nbytes}}
            yield {"ph": "C", "pid": 1, "name": "ready tasks", "ts": at / 1e3, "args": {"tasks": num_ready}}

    def _arrows(self, links: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        """An arrow for each copy: to the first task that uses what it brought, or, where none does (a write-back), from the last that made it."""
        starts: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (node, handle) -> (start, worker) of tasks
        ends: dict[tuple[int, int], list[tuple[int, int]]] = {}  # the same of their ends
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
            uses, users, again = starts.get((target, handle), []), ends.get((source, handle), []), arrivals[target, handle]
            at, last, next_time = bisect_left(uses, (end, -1)), bisect_right(users, (begin, _LAST)) - 1, bisect_right(again, end)
            if at < len(uses) and not (next_time < len(again) and again[next_time] <= uses[at][0]):  # else it was dropped and brought again
                start, worker = uses[at]
                yield {"ph": "s", **link, "ts": end / 1e3, **arrow}
                yield {"ph": "f", "bp": "e", "pid": 1, "tid": worker, "ts": start / 1e3, **arrow}
            elif last >= 0:
                made, worker = users[last]
                yield {"ph": "s", "pid": 1, "tid": worker, "ts": made / 1e3, **arrow}
                yield {"ph": "f", "bp": "e", **link, "ts": begin / 1e3, **arrow}
