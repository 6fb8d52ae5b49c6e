"""Two checkouts beside each other in one run: what a task costs and how long a step takes, so that a change of structure shows what it cost.

    git worktree add ../before COMMIT
    python benchmarks/same_speed.py --before ../before              # three rounds, writes benchmarks/results/same_speed.json
    python benchmarks/same_speed.py --before ../before --output=    # written nowhere

This checkout and the one of `--before` alternate, each measurement in a process of its own, with the packages of this environment. Tasks are those
of `overhead.py`, in short processes and five times as many rounds: the least counts, since other processes only add to what a task of microseconds
costs. Steps are those of `training.py`: the ratio is the median over rounds of present / before, neighbours in time, and a row whose bar lies
between the first and third quartile of its ratios is "not resolved". `same_runs.py` asks whether the two compute the same.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any, Final

import common
import overhead

TASK_ROUNDS: Final = 5
"""Rounds of tasks for each round of steps."""
BAR: Final = 1.03
"""Most that a task or a step may cost, as a multiple of what it cost before."""
TASKS: Final = {key: what for key, what, bar in overhead.FIGURES if bar and "traced" not in key}
"""Figures of `nntask bench overhead` that count, and what they are."""
STEPS: Final = {"tiny": ("tiny GPT-2, 2 x 256, a step", 10, 200), "1x1024": ("GPT-2 small, 1 x 1,024, a step", 1, 3)}
"""Case of training.py -> (what it is, untimed steps, timed steps)."""


def side(name: str, checkout: Path, arguments: tuple[str, ...]) -> common.Side:
    """This interpreter with the packages of `checkout` before its own, and the benchmarks of this checkout on both sides."""
    path = os.pathsep.join((str(checkout), str(common.ROOT / "benchmarks")))
    return common.Side(name, (sys.executable, "-P", *arguments), {**common.one_thread_blas(), "PYTHONPATH": path})


def tasks_row(what: str, now: list[float], before: list[float]) -> dict[str, Any]:
    """A comparison of the least of each side."""
    return common.compare(what, "us", min(now), "before", min(before), better="less", bar=f"ratio <= {BAR}")


def step_row(what: str, now: list[float], before: list[float]) -> dict[str, Any]:
    """A comparison whose ratio is the median over rounds."""
    ratios = [ours / theirs for ours, theirs in zip(now, before, strict=True)]
    found = common.compare(what, "s", statistics.median(now), "before", statistics.median(before), better="less", bar=f"ratio <= {BAR}")
    found["ratio"] = round(statistics.median(ratios), 4)
    found["met"] = found["ratio"] <= BAR
    low, _, high = statistics.quantiles(ratios, n=4)
    found["quartiles"] = [round(low, 4), round(high, 4)]
    if low <= BAR < high:
        found["verdict"] = "not resolved"
    return found


def main() -> None:
    parser = common.parser(__doc__, "same_speed")
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs its steps (at least 2)")
    options = parser.parse_args()
    before = options.before.resolve()
    machine = common.machine()
    checkouts = {"present": common.ROOT, "before": before}
    rounds: dict[str, dict[str, list[common.Measurement]]] = {}
    commands = {"tasks": ("-m", "nntask", "bench", "overhead", "--json", "--tasks=4000")}
    for case, (_, warmup, steps) in STEPS.items():
        script = str(common.ROOT / "benchmarks" / "training.py")
        commands[case] = (script, "--side=ours", f"--case={case}", f"--warmup={warmup}", f"--steps={steps}")
    for name, command in commands.items():
        num_rounds = options.rounds * (TASK_ROUNDS if name == "tasks" else 1)
        rounds[name] = common.alternate([side(which, checkout, command) for which, checkout in checkouts.items()], num_rounds)

    def both(name: str, key: str) -> list[list[float]]:
        return [[one[key] for one in rounds[name][which]] for which in checkouts]

    comparisons = [tasks_row(what, *both("tasks", key)) for key, what in TASKS.items()]
    comparisons += [step_row(what, *both(case, "seconds_per_step")) for case, (what, _, _) in STEPS.items()]
    common.finish(
        options.output, machine, ("nntask", "numpy", "numba"), {"rounds": options.rounds, "before": common.commit(before)}, comparisons, rounds=rounds
    )


if __name__ == "__main__":
    main()
