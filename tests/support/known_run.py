"""A run directory whose every number is known, for tests of its report: made by hand, except that our own writer writes the trace.

Four steps of a second each on two workers with a disk tier. In each, cpu:0 is 0.8 s in kernels and stalls for 0.1 s, cpu:1 is 0.5 s in kernels.
Six tasks of a step make values again, in 0.13 s.
Steps 3 and 4 are traced: in each, cpu:0 runs `matmul` for 40 ms and `adam` for 10 ms, cpu:1 runs `matmul` for 20 ms beside it, and 1 MB goes to the
disk; a step takes 50 ms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scheduler.core.records import HandleId, HandleRecord, HandleSpec, Mode
from scheduler.execution.trace import Trace

STEPS = 4
MS = 1_000_000
"""Nanoseconds."""
MACHINE: dict[str, Any] = {
    "workers": ["cpu:0", "cpu:1"],
    "budget_bytes": {"ram": 1 << 30, "disk": 8 << 30},
    "peak_flops": 200e9,
    "policy": "prio",
    "tasks_per_step": 3,
    "versions": {"nntask": "0.1.0"},
}
PLAN: dict[str, Any] = {
    "order": "layers",
    "recompute": "norm",
    "recompute_is_given": False,
    "seconds_without_recompute": 1.5,
    "values": [
        {"name": "norm", "operation": "norm", "layers": 2, "bytes": 4 << 20, "again_bytes": 3 << 20, "moved_bytes": 1 << 20, "kept_bytes": 0}
        | {"seconds_again": 0.25, "seconds_moved": 0.75},
        {"name": "<a>", "operation": "a", "layers": 0, "bytes": 1 << 20, "again_bytes": 0, "moved_bytes": 0, "kept_bytes": 1 << 20}
        | {"seconds_again": 0.5, "seconds_moved": 0},
    ],
    "forecast_bytes": {"layers": 2e9},
    "forecast_seconds": {"layers": 0.9},
}
ABOUT: dict[str, Any] = {
    "unix_ns": 1_000_000_000_000_000_000,
    "steps": [3, 4],
    "seconds_per_step": 0.05,
    "codelets": {"matmul": {"tasks": 2, "flops": 3e9, "bytes": 6e6}, "adam": {"tasks": 1, "flops": 0.0, "bytes": 2e7}},
    "bounds_seconds": {"area": 0.035, "critical_path": 0.04, "link": 0.001},
}


def line(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "loss": 8.0 - step,
        "lr": 1e-3 * step,
        "grad_norm": 1.0 / step,
        "tokens": 1000,
        "seconds": 1.0,
        "tokens_per_second": 1000.0,
        "tflops": 0.1,
        "mfu": 0.5,
        "resident_peak_bytes": {"ram": step << 28, "disk": 1 << 30},
        "moved_bytes": {"ram->disk": 2_000_000_000, **({"disk->ram": 1_000_000_000} if step % 2 else {})},
        "evictions": 3,
        "wait_seconds": 0.7,
        "stall_seconds": 0.1,
        "hit_rate": 0.9,
        "busy_seconds": {"cpu:0": 0.8, "cpu:1": 0.5},
        "worker_stall_seconds": {"cpu:0": 0.1},
        "recomputed_tasks": 6,
        "recompute_seconds": 0.13,
    }


def access() -> list[tuple[HandleRecord, Mode]]:
    """What a task touches."""
    return [(HandleRecord(HandleId(7), HandleSpec(1 << 20, 1 << 20, None, "weight", "persistent", "parameters")), "R")]


def write_trace(path: Path, about: dict[str, Any] = ABOUT, *, repeats: int = 1) -> None:
    """The trace, with each task cut into `repeats` tasks."""
    trace, steps = Trace(), []
    for step in (3, 4):
        begin = (step - 3) * 50 * MS
        for worker, name, start, length in ((0, "matmul", 0, 40), (1, "matmul", 0, 20), (0, "adam", 40, 10)):
            each = length * MS // repeats
            for part in range(repeats):
                at = begin + start * MS + part * each
                trace.add_task(worker, name, part, at, at + each, 0, access())
                steps.append(step)
        trace.add_copy(0, 1, "weight", 1_000_000, begin + 10 * MS, begin + 15 * MS, 7)
        trace.add_counters(begin + 20 * MS, [step << 20, step << 21], 0)
    trace.write(path, {0: "cpu:0", 1: "cpu:1"}, ["ram", "disk"], steps=steps, about=about)


def write_node(folder: Path) -> None:
    """The files of a node, or of a run on one machine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line(step)) + "\n" for step in range(1, STEPS + 1)))
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    write_trace(folder / "trace.json.gz")


def write_run(folder: Path) -> Path:
    """A run that has ended."""
    write_node(folder)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "summary.json").write_text(json.dumps({"steps": STEPS, "loss_last": 4.0, "workers": MACHINE["workers"]}))
    return folder


def write_cluster_run(folder: Path) -> Path:
    """The same on two nodes, each of which does what the run does on one machine."""
    write_run(folder)
    for name in ("machine.json", "plan.json", "trace.json.gz"):
        (folder / name).unlink()
    for name in ("left", "right"):
        write_node(folder / "nodes" / name)
        (folder / "nodes" / name / "plan.json").write_text(json.dumps(PLAN))
    return folder
