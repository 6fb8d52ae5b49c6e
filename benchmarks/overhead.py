"""What the runtime costs per task: `nntask bench overhead` beside Dask's threaded scheduler, each in fresh processes.

    python benchmarks/overhead.py              # three rounds, writes benchmarks/results/overhead.json
    python benchmarks/overhead.py --output=    # written nowhere

Ours: empty tasks with three handles on one worker, wall seconds / tasks, with tracing off and on; then kernels of about 200 microseconds on two
workers, (wall seconds x workers - processor seconds inside kernels) / tasks: submitted, replayed, and mixed, where the program submits as many
tasks as are replayed meanwhile: an average of the two, which carries no bar. Budgets are on everywhere. Bars: empty tasks 25 us submitted and 5
replayed; with kernels 30 and 10.

Dask: the same empty tasks, each with three dependencies; wall seconds / tasks, so its second thread is not charged. Twice: as it comes, which
must be at least 5 times slower than our replayed and submitted tasks, and handing tasks to its threads 50 at a time (`chunksize`), which is the
quickest setting found (one thread and smaller numbers were slower).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import perf_counter
from typing import Any, Final

import common

CHAINS: Final = 64
REPEATS: Final = 5
DASK: Final = {"dask_us_per_task": {}, "dask_chunks_us_per_task": {"chunksize": 50}}
FIGURES: Final = (
    ("submitted_us_per_task", "empty task, submitted, one worker", "ours <= 25"),
    ("replayed_us_per_task", "empty task, replayed, one worker", "ours <= 5"),
    ("traced_submitted_us_per_task", "empty task, submitted, one worker, traced", "ours <= 25"),
    ("traced_replayed_us_per_task", "empty task, replayed, one worker, traced", "ours <= 5"),
    ("submitted_us_two_workers", "200 us kernels, submitted, two workers", "ours <= 30"),
    ("replayed_us_two_workers", "200 us kernels, replayed, two workers", "ours <= 10"),
    ("mixed_us_two_workers", "200 us kernels, half replayed, half submitted meanwhile, two workers", ""),
)
AGAINST_DASK: Final = "ratio <= 0.2"
"""Dask's threaded scheduler, as it comes, is at least five times slower; the same empty tasks."""


def measure_dask(num_tasks: int) -> dict[str, float]:
    """Microseconds per empty task; the graph is `CHAINS` chains whose tasks read two more values all of them share."""
    import dask.threaded

    graph: dict[str, Any] = {f"c{chain}": 0 for chain in range(CHAINS)} | {"a": 0, "b": 0}
    last = [f"c{chain}" for chain in range(CHAINS)]
    for number in range(num_tasks):
        chain = number % CHAINS
        graph[f"t{number}"] = (nothing, "a", "b", last[chain])
        last[chain] = f"t{number}"
    found = {}
    for name, settings in DASK.items():
        seconds = []
        for _ in range(REPEATS):
            begin = perf_counter()
            dask.threaded.get(graph, last, num_workers=common.usable_cores(), **settings)
            seconds.append(perf_counter() - begin)
        found[name] = statistics.median(seconds) / num_tasks * 1e6
    return found


def nothing(*values: object) -> None:
    """Do nothing."""


def comparisons(ours: common.Measurement, dask: common.Measurement) -> list[dict[str, Any]]:
    """Our tasks against their bars, beside Dask's empty ones; then both of Dask's figures beside our empty ones."""
    plain, chunks = "dask.threaded", "dask.threaded, 50 at a time"
    rows = [
        common.compare(what, "us", ours[key], plain + (", empty" if "kernels" in what else ""), dask["dask_us_per_task"], better="less", bar=bar)
        for key, what, bar in FIGURES
    ]
    for key, what, _ in FIGURES[:2]:
        rows.append(common.compare(f"{what}, beside Dask", "us", ours[key], plain, dask["dask_us_per_task"], better="less", bar=AGAINST_DASK))
        rows.append(common.compare(f"{what}, beside Dask", "us", ours[key], chunks, dask["dask_chunks_us_per_task"], better="less"))
    return rows


def main() -> None:
    parser = common.parser(__doc__, "overhead")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--tasks", type=int, default=20000, help="empty tasks per measurement; Dask gets a quarter")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "dask":
        common.report(measure_dask(options.tasks // 4))
        return
    command = (sys.executable, "-m", "nntask", "bench", "overhead", "--json", f"--tasks={options.tasks}")
    sides = [
        common.Side("ours", command, common.one_thread_blas()),
        common.Side("dask", common.this_script(__file__, "--side=dask", f"--tasks={options.tasks}")),
    ]
    machine, rounds, middle = common.measured(sides, options.rounds)
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy", "dask"),
        {"tasks": options.tasks, "rounds": options.rounds},
        comparisons(middle["ours"], middle["dask"]),
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
