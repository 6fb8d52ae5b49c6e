"""Many workers: 64 workers whose kernels sleep, beside bare threads that sleep as often and do nothing else.

    python benchmarks/workers.py                      # five rounds, writes benchmarks/results/workers.json
    python benchmarks/workers.py --before CHECKOUT    # another commit's code in the same rounds, instead of the bare threads
    python benchmarks/workers.py --output=            # written nowhere

A sleeping kernel needs no core, so any machine can hold 64 of them. A recorded step has two chains of tasks for each worker; every task reads two
shared handles and updates the one of its chain. "share" is tasks x requested sleep / (workers x wall seconds): what a kernel sleeps too long and
waits for the interpreter counts as lost. "rate" is tasks a second, "processor" the microseconds of processor time of a task, and "switches" its
context switches. Empty kernels show the largest rate. Each figure is the median of five replays. Bare threads, their start
included, show what CPython and the system leave of a sleep alone. Bar: 0.9 of the time in kernels of 4 ms.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any, Final

import common

WORKERS: Final = 64
REPLAYS: Final = 5
CASES: Final = {"4 ms": (4e-3, 6400), "1 ms": (1e-3, 6400), "empty": (0.0, 12800)}
"""Seconds that a kernel sleeps, and the number of tasks of a step."""
FIGURES: Final = (("rate", "tasks/s", "more"), ("processor", "us", "less"), ("switches", "", "less"))
BARS: Final = {"4 ms": "ours >= 0.9"}
NBYTES: Final = 4096


def kernel(*views: object, seconds: float) -> None:
    """Sleep."""
    if seconds:
        sleep(seconds)


def no_view(memory: object, offset: int) -> bool:
    """Stand for an array that no kernel looks at."""
    return True


def switches() -> int:
    """Context switches of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def spent(seconds: float, num_tasks: int, action: Any) -> dict[str, float]:
    """The figures of one run of `num_tasks` kernels."""
    wall, processor, switched = perf_counter(), process_time(), switches()
    action()
    wall, processor, switched = perf_counter() - wall, process_time() - processor, switches() - switched
    return {
        "share": num_tasks * seconds / (WORKERS * wall),
        "rate": num_tasks / wall,
        "processor": processor / num_tasks * 1e6,
        "switches": switched / num_tasks,
    }


def middle(name: str, runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians by "case: figure"."""
    return {f"{name}: {figure}": statistics.median(run[figure] for run in runs) for figure in runs[0]}


def measure_ours() -> dict[str, float]:
    """Replays of recorded steps."""
    from scheduler import Codelet, Runtime

    codelet = Codelet("sleep", cpu=kernel)
    figures: dict[str, float] = {}
    for name, (seconds, num_tasks) in CASES.items():
        with Runtime(WORKERS, ram=1 << 28) as runtime:
            handles = [runtime.handle(NBYTES, no_view, name=f"h{number}", kind="persistent") for number in range(2 + 2 * WORKERS)]
            for handle in handles:
                with runtime.acquire(handle, "W"):
                    pass
            with runtime.record() as step:
                for number in range(num_tasks):
                    own = handles[2 + number % (2 * WORKERS)]
                    runtime.submit(codelet, [(handles[0], "R"), (handles[1], "R"), (own, "RW")], {"seconds": seconds})
            runs = [spent(seconds, num_tasks, lambda step=step: step.replay().wait()) for _ in range(2 + REPLAYS)]
        figures |= middle(name, runs[2:])  # each of the two instances has run once by then
    return figures


def measure_threads() -> dict[str, float]:
    """Threads that sleep and do nothing else."""

    def sleep_all(seconds: float, count: int) -> None:
        def sleep_on() -> None:
            for _ in range(count):
                kernel(seconds=seconds)

        threads = [threading.Thread(target=sleep_on) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    figures: dict[str, float] = {}
    for name, (seconds, num_tasks) in CASES.items():
        if seconds:
            figures |= middle(name, [spent(seconds, num_tasks, lambda s=seconds, n=num_tasks // WORKERS: sleep_all(s, n)) for _ in range(REPLAYS)])
    return figures


def comparisons(ours: common.Measurement, theirs: common.Measurement, peer: str, more: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The share in kernels against its bar, and `more` figures."""
    rows = []
    for name, (seconds, _) in CASES.items():
        wanted = ([("share", "of the time", "more")] if seconds else []) + list(more)
        for figure, unit, better in wanted:
            key = f"{name}: {figure}"
            if key in theirs:
                bar = BARS.get(name, "") if figure == "share" else ""
                rows.append(common.compare(f"{figure}, kernels of {name}", unit, ours[key], peer, theirs[key], better=better, bar=bar))
    return rows


def main() -> None:
    parser = common.parser(__doc__, "workers")
    parser.add_argument("--rounds", type=int, default=5, help="times each side runs")
    parser.add_argument("--before", type=Path, help="checkout of the commit to compare with; the result is only printed")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        common.report(measure_ours() if options.side == "ours" else measure_threads())
        return
    here = common.one_thread_blas() | {"PYTHONPATH": str(common.ROOT)}
    sides = [common.Side("ours", common.this_script(__file__, "--side=ours"), here)]
    if options.before:
        before = here | {"PYTHONPATH": str(options.before.resolve())}
        sides.append(common.Side("before", common.this_script(__file__, "--side=ours"), before))
    else:
        sides.append(common.Side("bare threads", common.this_script(__file__, "--side=threads"), here))
    machine, rounds, medians = common.measured(sides, options.rounds)
    peer = sides[1].name
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy"),
        {"workers": WORKERS, "replays": REPLAYS, "rounds": options.rounds},
        comparisons(medians["ours"], medians[peer], peer, FIGURES if options.before else ()),
        keep=not options.before,
        medians=medians,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
