"""What the runtime costs per task: `nntask bench overhead` beside Dask's threaded scheduler, each in fresh processes.

    python benchmarks/overhead.py              # three rounds, writes benchmarks/results/overhead.json
    python benchmarks/overhead.py --output=    # written nowhere

Ours: empty tasks with three handles, one worker; then kernels of about 200 microseconds on two workers. Cost per task is (wall seconds x workers -
seconds inside kernels) / tasks. Bars: 50 us submitted, 10 us replayed.

Dask: the same empty tasks, each with three dependencies; wall seconds / tasks, so its second thread is not charged. Twice: as it comes, and
handing tasks to its threads 50 at a time (`chunksize`), which is the quickest setting found (one thread and smaller numbers were slower).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

CHAINS: Final = 64
REPEATS: Final = 5
DASK: Final = {"dask_us_per_task": {}, "dask_chunks_us_per_task": {"chunksize": 50}}
FIGURES: Final = (
    ("submitted_us_per_task", "empty task, submitted, one worker", "ours <= 50"),
    ("replayed_us_per_task", "empty task, replayed, one worker", "ours <= 10"),
)


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
    """Our empty tasks beside both of Dask's figures."""
    rows = []
    for key, what, bar in FIGURES:
        rows.append(common.compare(what, "us", ours[key], "dask.threaded", dask["dask_us_per_task"], better="less", bar=bar))
        peer = "dask.threaded, 50 at a time"
        rows.append(common.compare(what, "us", ours[key], peer, dask["dask_chunks_us_per_task"], better="less"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--tasks", type=int, default=20000, help="empty tasks per measurement; Dask gets a quarter")
    parser.add_argument("--output", default="overhead", help="name of the result; empty: print it only")
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
    machine = common.machine()
    rounds = common.alternate(sides, options.rounds)
    middle = {name: common.medians(measured) for name, measured in rounds.items()}
    result = {
        "machine": machine,
        "versions": common.versions("nntask", "numpy", "dask"),
        "settings": {"tasks": options.tasks, "rounds": options.rounds},
        "comparisons": comparisons(middle["ours"], middle["dask"]),
        "medians": middle,
        "rounds": rounds,
    }
    common.finish(options.output, result)


if __name__ == "__main__":
    main()
