"""Arrows of the trace: every copy leads to the task it serves, or comes from the task whose result it saves."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from scheduler import Runtime, Trace
from scheduler.core.records import HandleId, HandleRecord, HandleSpec, Mode

KIB = 1 << 10
RAM, DISK = 0, 1


def access(number: int) -> list[tuple[HandleRecord, Mode]]:
    """The accesses of a task that reads one handle."""
    return [(HandleRecord(HandleId(number), HandleSpec(4096, 4096, None, f"h{number}", "temporary", "activations")), "R")]


def arrows(trace: Trace, path: Path) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """(name, start, end) of each arrow; starts and ends are (pid, ts in microseconds), pid 1 for workers and 2 for links."""
    trace.write(path, {0: "cpu:0"}, ["ram", "disk"])
    events = json.loads(path.read_text())["traceEvents"]
    starts = {event["id"]: (event["pid"], event["ts"]) for event in events if event["ph"] == "s"}
    ends = {event["id"]: (event["pid"], event["ts"]) for event in events if event["ph"] == "f"}
    names = {event["id"]: event["name"] for event in events if event["ph"] == "s"}
    assert starts.keys() == ends.keys()
    return [(names[number], starts[number], ends[number]) for number in sorted(starts)]


def test_arrows_of_fetches_and_write_backs(tmp_path: Path) -> None:
    """A copy in leads to the next task on its node, a copy out comes from the last; one that was dropped unused leads nowhere."""
    trace = Trace()
    trace.add_task(0, "make", 1, 1000, 2000, RAM, access(7))
    trace.add_copy(RAM, DISK, "saved", 4096, 3000, 4000, 7)
    trace.add_copy(DISK, RAM, "dropped", 4096, 5000, 6000, 7)
    trace.add_copy(DISK, RAM, "used", 4096, 7000, 8000, 7)
    trace.add_task(0, "use", 2, 9000, 9500, RAM, access(7))
    trace.add_copy(RAM, DISK, "of the program", 4096, 3000, 4000, 8)
    assert arrows(trace, tmp_path / "trace.json") == [("saved", (1, 2.0), (2, 3.0)), ("used", (2, 8.0), (1, 9.0))]


def test_threads_that_report_at_once_mix_nothing_up(tmp_path: Path) -> None:
    """Every copy leads to the one task that uses its data."""
    trace, count = Trace(), 1000

    def report(worker: int) -> None:
        for number in range(worker * count, (worker + 1) * count):
            trace.add_copy(DISK, RAM, f"{number}", 4096, 1000 * number, 1000 * number + 1, number)
            trace.add_task(worker, "use", number, 1000 * number + 500, 1000 * number + 600, RAM, access(number))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=report, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    found = arrows(trace, tmp_path / "trace.json")
    assert len(found) == 4 * count
    assert all(end == (1, int(name) + 0.5) for name, _, end in found)


def test_prefetches_and_early_write_backs_have_arrows(tmp_path: Path, kit) -> None:  # type: ignore[no-untyped-def]
    """A recorded step over twice as much data as memory holds: what comes in leads to a task, what goes out comes from one, or from the program."""
    trace = Trace()
    with Runtime(1, ram=48 * KIB, disk=tmp_path / "tier", trace=trace) as runtime:
        data = [kit.filled(runtime, 1, f"data {at}") for at in range(24)]
        with runtime.record() as step:
            for each in data:
                runtime.submit(kit.double, [(each, "RW")])
        for _ in range(4):
            step.replay().wait()
        stats = runtime.stats()
    found = arrows(trace, tmp_path / "trace.json")
    read, written = (stats["moved_bytes"][link] // 64 for link in ("disk->ram", "ram->disk"))
    assert stats["hits"] > stats["misses"]  # most were prefetched
    assert all(start[1] <= end[1] for _, start, end in found)
    assert sum(start[0] == 2 for _, start, _ in found) >= read - 2  # hardly any is dropped before its task
    assert sum(start[0] == 1 for _, start, _ in found) >= written - len(data) > 0
