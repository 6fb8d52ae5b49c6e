"""Dask graphs on our scheduler beside Dask's own: array jobs, a bag of 200,000 tasks, and a job whose data is eight times the memory.

    python benchmarks/dask/graphs.py              # five rounds, writes benchmarks/results/dask_graphs.json
    python benchmarks/dask/graphs.py --output=    # written nowhere

Each round runs each side in a process of its own, in turn. The array jobs (tall QR, matrix product, sum after a change of chunks) and the bag run
on `wrappers.dask.get` and `dask.threaded.get`, with as many threads as cores. Of the bag, *end to end* is from the first line that makes it to the
result; *from get on* is `get` over the graph as a plain dict, as Dask hands it over after its own optimization. The memory job standardizes a
matrix in two passes that each need all of it: ours within a budget that, with what the process has at the start and room for the tasks under way,
is an eighth of it; `distributed` on one worker with that eighth as its memory limit. Its figures are bytes written to disk, peak resident memory,
and whether it came to its end. Bars: array jobs at most 1.05 of the threaded scheduler's time, the bag at most 0.7 end to end and 0.4 from get on,
the memory job to the end with fewer bytes spilled than by `distributed`, if that gets there at all.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

ARRAY_JOBS: Final = ("qr", "matmul", "rechunk_sum")
WORDS: Final = {"qr": "tall QR", "matmul": "matrix product", "rechunk_sum": "sum after a change of chunks"}


def array_job(name: str, scale: float) -> Any:
    """A dask collection of one number; `scale` multiplies the extents."""
    import dask.array as da

    rng = da.random.default_rng(0)
    if name == "qr":
        rows, columns = int(65536 * scale), int(256 * scale)
        q, r = da.linalg.qr(rng.standard_normal((rows, columns), chunks=(rows // 16, columns)))
        return abs(q @ r).sum()
    if name == "matmul":
        extent = int(4096 * scale)
        a = rng.standard_normal((extent, extent), chunks=extent // 8)
        return abs(a @ a.T).sum()
    extent = int(8192 * scale)
    x = rng.random((extent, extent), chunks=(extent // 16, extent))
    return x.rechunk((extent, extent // 16)).sum()


def increment(number: int) -> int:
    return number + 1


def bag(num_tasks: int) -> Any:
    """A bag whose graph has about so many tasks once Dask has optimized it: a partition makes two, and a sum of eight sums one."""
    import dask.bag

    count = num_tasks * 7 // 15
    return dask.bag.from_sequence(range(count), npartitions=count).map(increment).sum()


def measure_arrays(get: Callable[..., Any], scale: float, repetitions: int, workers: int) -> dict[str, float]:
    """Seconds of each array job, the median of the repetitions, and its result."""
    import statistics

    found: dict[str, float] = {}
    for name in ARRAY_JOBS:
        job = array_job(name, scale)
        job.compute(scheduler=get, num_workers=workers)
        seconds = []
        for _ in range(repetitions):
            begin = perf_counter()
            result = float(job.compute(scheduler=get, num_workers=workers))
            seconds.append(perf_counter() - begin)
        found |= {f"{name}_seconds": statistics.median(seconds), f"{name}_result": result}
    return found


def measure_bag(get: Callable[..., Any], num_tasks: int, workers: int) -> dict[str, float]:
    """Seconds of the bag end to end, and of `get` alone."""
    begin = perf_counter()
    result = bag(num_tasks).compute(scheduler=get, num_workers=workers)
    seconds = perf_counter() - begin
    graphs: list[tuple[Any, Any]] = []

    def catch(graph: Any, keys: Any, **options: Any) -> list[int]:
        graphs.append((dict(graph.__dask_graph__()), keys))
        return [0]

    bag(num_tasks).compute(scheduler=catch)
    graph, keys = graphs.pop()
    begin = perf_counter()
    (again,) = get(graph, keys, num_workers=workers)
    return {
        "bag_seconds": seconds,
        "bag_get_seconds": perf_counter() - begin,
        "bag_tasks": float(len(graph)),
        "bag_result": float(result + again) / 2,
    }


def memory_job(nbytes: int) -> Any:
    """A matrix of that many bytes standardized, and a number of it: two passes that each need all of it."""
    import dask.array as da

    extent = int(math.sqrt(nbytes / 8)) // 16 * 16
    x = da.random.default_rng(0).random((extent, extent), chunks=extent // 16)
    centred = x - x.mean()
    return ((centred / abs(centred).max()) ** 3).sum()


def resident() -> int:
    """Resident memory of this process, bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def measure_memory_ours(nbytes: int, workers: int, directory: str) -> dict[str, float]:
    """The memory job within an eighth of its data."""
    import dask.array  # noqa: F401  # part of what the process has at the start

    from wrappers.dask import runtime

    limit = nbytes // 8
    temporaries = 3 * workers * (nbytes // 256)
    budget = limit - resident() - temporaries
    with runtime(ram=budget, disk=directory, workers=workers) as graphs:
        begin = perf_counter()
        result = float(memory_job(nbytes).compute())
        seconds = perf_counter() - begin
        stats = graphs.stats()
    return {
        "finished": 1.0,
        "seconds": seconds,
        "result": result,
        "spilled_bytes": float(stats["moved_bytes"].get("ram->disk", 0)),
        "read_bytes": float(stats["moved_bytes"].get("disk->ram", 0)),
        "peak_rss_bytes": float(common.peak_rss()),
        "limit_bytes": float(limit),
        "budget_bytes": float(budget),
        "peak_counted_bytes": float(stats["peak_bytes"]),
    }


def measure_memory_distributed(nbytes: int, workers: int, directory: str) -> dict[str, float]:
    """The memory job on one worker of `distributed` whose memory limit is an eighth of its data."""
    from distributed import Client, LocalCluster
    from distributed.scheduler import KilledWorker

    limit = nbytes // 8
    found = {"finished": 0.0, "seconds": 0.0, "result": 0.0, "spilled_bytes": 0.0, "limit_bytes": float(limit)}
    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=workers,
            memory_limit=limit,
            local_directory=directory,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        begin = perf_counter()
        with contextlib.suppress(KilledWorker, TimeoutError):
            found["result"] = float(client.compute(memory_job(nbytes)).result(timeout=240))
            found |= {"finished": 1.0, "seconds": perf_counter() - begin}
            (spilled,) = client.run(lambda dask_worker: dask_worker.data.cumulative_metrics.get(("disk-write", "bytes"), 0)).values()
            found["spilled_bytes"] = float(spilled)
    return found


@contextlib.contextmanager
def scratch(place: str) -> Iterator[str]:
    """A directory for what is spilled."""
    with tempfile.TemporaryDirectory(dir=place or None) as directory:
        yield directory


def measure(side: str, options: argparse.Namespace) -> dict[str, float]:
    """What one side's process measures."""
    if side == "distributed":
        with scratch(options.disk) as directory:
            return measure_memory_distributed(options.memory, options.workers, directory)
    if side == "memory":
        with scratch(options.disk) as directory:
            return measure_memory_ours(options.memory, options.workers, directory)
    if side == "ours":
        from wrappers.dask import get
    else:
        from dask.threaded import get
    found = measure_arrays(get, options.scale, options.repetitions, options.workers) if options.repetitions else {}
    return found | (measure_bag(get, options.tasks, options.workers) if options.tasks else {})


def comparisons(middle: dict[str, common.Measurement]) -> list[dict[str, Any]]:
    """The rows of the table."""
    ours, theirs = middle["ours"], middle["threaded"]
    rows = [
        common.compare(
            f"dask.array: {WORDS[name]}",
            "s",
            ours[f"{name}_seconds"],
            "dask.threaded",
            theirs[f"{name}_seconds"],
            better="less",
            bar="ratio <= 1.05",
        )
        for name in ARRAY_JOBS
        if f"{name}_seconds" in ours
    ]
    for key, what, bar in (("bag_seconds", "end to end", "ratio <= 0.7"), ("bag_get_seconds", "from get on", "ratio <= 0.4")):
        if key in ours:
            what = f"bag of {ours['bag_tasks']:,.0f} tasks, {what}"
            rows.append(common.compare(what, "s", ours[key], "dask.threaded", theirs[key], better="less", bar=bar))
    if "memory" in middle:
        spilled, peer = middle["memory"], middle["distributed"]
        what = "bytes spilled with memory for an eighth of the data"
        if peer["finished"]:
            rows.append(
                common.compare(
                    what, "GB", spilled["spilled_bytes"] / 1e9, "distributed", peer["spilled_bytes"] / 1e9, better="less", bar="ratio <= 1.0"
                )
            )
        rows.append(
            common.compare(
                "finished with memory for an eighth of the data",
                "",
                spilled["finished"],
                "distributed",
                peer["finished"],
                better="more",
                bar="ours >= 1",
            )
        )
    return rows


def check(rounds: dict[str, list[common.Measurement]]) -> None:
    """Equal results on every side and in every round.

    Raises:
        SystemExit: they are not.
    """
    for group in (("ours", "threaded"), ("memory", "distributed")):
        found: dict[str, float] = {}
        for side in group:
            for one in rounds.get(side, ()):
                for key, value in one.items():
                    if key.endswith("result") and one.get("finished", 1.0) and not math.isclose(value, found.setdefault(key, value), rel_tol=1e-9):
                        raise SystemExit(f"{side} found {key} {value!r}, others {found[key]!r}")


def main() -> None:
    parser = common.parser(__doc__, "dask_graphs")
    parser.add_argument("--rounds", type=int, default=5, help="processes per side")
    parser.add_argument("--repetitions", type=int, default=3, help="computations of each array job in a process; 0 leaves them out")
    parser.add_argument("--scale", type=float, default=1.0, help="of the extents of the array jobs")
    parser.add_argument("--tasks", type=int, default=200_000, help="tasks of the bag; 0 leaves it out")
    parser.add_argument("--memory", type=int, default=3 << 30, help="bytes of the memory job's data; 0 leaves it out")
    parser.add_argument("--disk", default="", help="directory for what is spilled (default: the system's temporary directory)")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="threads")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        common.report(measure(options.side, options))
        return
    names = ("repetitions", "scale", "tasks", "memory", "disk", "workers")
    again = [f"--{name}={getattr(options, name)}" for name in names]
    sides = ["ours", "threaded"] if options.repetitions or options.tasks else []
    sides += ["memory", "distributed"] if options.memory else []
    machine = common.machine()
    rounds = common.alternate(
        [common.Side(side, common.this_script(__file__, f"--side={side}", *again), environment()) for side in sides], options.rounds
    )
    check(rounds)
    middle = {side: common.medians(found) for side, found in rounds.items()}
    settings = {name: getattr(options, name) for name in ("rounds", "repetitions", "scale", "tasks", "memory", "workers")}
    common.finish(
        options.output,
        machine,
        ("nntask", "dask", "distributed", "numpy"),
        settings,
        comparisons({"ours": {}, "threaded": {}, **middle}),
        medians=middle,
        rounds=rounds,
    )


def environment() -> dict[str, str]:
    """One thread per BLAS call, and this project to import."""
    return {**common.one_thread_blas(), "PYTHONPATH": str(common.ROOT)}


if __name__ == "__main__":
    main()
