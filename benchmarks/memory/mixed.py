"""CPU workers and GPUs together: seconds of steps in virtual time under `mixed`, compared with either kind alone and with a lower bound.

    python benchmarks/memory/mixed.py            # a tiled Cholesky factorisation and a step of GPT-2 small; twenty minutes, needs SciPy

It writes benchmarks/results/mixed.json. Durations come from a table: a core takes the larger of flops / CORE.flops and bytes / CORE.nbytes; a GPU is
`PRODUCT` times as fast where flops take longer, else `OTHER` times. The bound is a linear program. Its variables are the share of each task that
runs on GPUs, the end of each task, and T:

    minimise    T
    subject to  T >= end of each task >= end of each predecessor + seconds of the task in its shares
                T * workers of a kind >= seconds of all shares on that kind

Every schedule meets these conditions with shares of 0 and 1. Copies take no time in them. Of steps with more tasks than `SOLVED`, the bound leaves
predecessors out: the least T is then where tasks go to GPUs in the order of what they gain there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bounds"))
import common
import numpy as np
from jobs import captured
from linear_program import LinearProgram

from nntask import PRESETS
from nntask.config import ModelSettings, TilingSettings, TrainSettings
from scheduler import RW, CapturingRuntime, Codelet, R
from scheduler.machine import Rate, RecordedTask, StepPlan
from scheduler.planning import by_urgency
from scheduler.simulation import simulate

CORE: Final = Rate(5e10, 1e10)
PRODUCT: Final = 30
OTHER: Final = 3
LINK: Final = (1e-5, 50e9)
"""Seconds and bytes per second of each link, in each direction."""
MACHINES: Final = ((1, 16), (1, 64), (4, 32), (8, 64))
"""Numbers of GPUs and of cores."""
SOLVED: Final = 20_000
"""Largest number of tasks whose linear program with predecessors is solved in minutes."""
TILE: Final = 1024
"""Rows of a tile of the factorisation."""


@dataclass(frozen=True, slots=True)
class Job:
    """A step and the seconds of each of its tasks on a core and on a GPU, shape (tasks,)."""

    plan: StepPlan
    core: Sequence[float]
    gpu: Sequence[float]


def job(plan: StepPlan, costs: Sequence[tuple[float, float]]) -> Job:
    """Return a step with the durations of the table, given (flops, bytes) of its tasks."""
    core = [max(flops / CORE.flops, nbytes / CORE.nbytes, 1e-7) for flops, nbytes in costs]
    ratios = [PRODUCT if flops / CORE.flops > nbytes / CORE.nbytes else OTHER for flops, nbytes in costs]
    return Job(plan, core, [seconds / ratio for seconds, ratio in zip(core, ratios, strict=True)])


def cholesky(size: int) -> Job:
    """Return the factorisation of `size` x `size` tiles; the factorisation of a tile counts as no product."""
    runtime = CapturingRuntime()
    potrf, trsm, syrk, gemm = (Codelet(name, cpu=_computes_nothing) for name in ("potrf", "trsm", "syrk", "gemm"))
    places = [(i, j) for i in range(size) for j in range(i + 1)]
    tile = {at: runtime.handle(4 * TILE**2, lambda memory, offset: None, name=f"A{at}", kind="persistent") for at in places}
    with runtime.record():
        for k in range(size):
            runtime.submit(potrf, [(tile[k, k], RW)])
            for i in range(k + 1, size):
                runtime.submit(trsm, [(tile[k, k], R), (tile[i, k], RW)])
            for i in range(k + 1, size):
                runtime.submit(syrk, [(tile[i, k], R), (tile[i, i], RW)])
                for j in range(k + 1, i):
                    runtime.submit(gemm, [(tile[i, k], R), (tile[j, k], R), (tile[i, j], RW)])
    costs = {
        "potrf": (0.0, TILE**3 / 3 / CORE.flops * CORE.nbytes),
        "trsm": (TILE**3, 0.0),
        "syrk": (TILE**3, 0.0),
        "gemm": (2 * TILE**3, 0.0),
    }
    return job(runtime.plan, [costs[task.name] for task in runtime.plan.tasks])


def _computes_nothing(*tiles: object) -> None:
    """Kernel of tasks in virtual time."""


def language_model(model: ModelSettings, num_layers: int, tiling: TilingSettings) -> Job:
    """Return a training step of a preset with fewer layers."""
    plan = captured(TrainSettings(model=model, tiling=tiling), replace(PRESETS[model.model or ""], n_layer=num_layers))
    return job(plan, [_cost(task) for task in plan.tasks])


def _cost(task: RecordedTask) -> tuple[float, float]:
    cost = getattr(task.codelet, "cost", None)
    nbytes = float(sum(handle.spec.nbytes for handle, _ in task.accesses))
    if cost is None:
        return 0.0, nbytes
    flops, nbytes = cost([handle.spec.view for handle, _ in task.accesses], task.constants)
    return flops, nbytes


def seconds_of(step: Job, gpus: int, cores: int) -> float:
    """Return the seconds of a step in virtual time under dmdas, with the priorities of mixed steps."""
    shared = {task: 1 / (gpus / gpu + cores / core) for task, gpu, core in zip(step.plan.tasks, step.gpu, step.core, strict=True)}
    tables = {"cpu": step.core, "sim": step.gpu}
    return simulate(
        by_urgency(step.plan, shared),
        workers=[*(("sim", 1 + number, 3) for number in range(gpus)), *[("cpu", 0, 1)] * cores],
        nodes=[("ram", 1 << 42), *((f"gpu:{number}", 80 << 30) for number in range(gpus))],
        policy="dmdas",
        duration=lambda task, kind: tables[kind][task.position] if task.step is not None else 0.0,
        transfer=lambda source, target, nbytes: LINK[0] + nbytes / LINK[1],
    ).seconds


def bound(step: Job, gpus: int, cores: int) -> float:
    """Return the bound of the module's docstring in seconds.

    Raises:
        RuntimeError: the solver failed.
        ImportError: SciPy is not installed.
    """
    scale = max(step.core)
    core, gpu = np.array(step.core) / scale, np.array(step.gpu) / scale
    program, number = LinearProgram(), len(core)
    share, end = program.variables(np.ones(number)), program.variables(np.full(number, np.inf))
    time, rows = program.variables(np.array([np.inf])), np.arange(number)
    row, ones = np.zeros(number, int), np.ones(number)
    program.at_least(np.zeros(1), (row[:1], time, np.array([float(gpus)])), (row, share, -gpu))
    program.at_least(np.array([core.sum()]), (row[:1], time, np.array([float(cores)])), (row, share, core))
    program.at_least(core, (rows, end, ones), (rows, share, core - gpu))
    program.at_least(np.zeros(number), (rows, np.repeat(time, number), ones), (rows, end, -ones))
    edges = [(before, after) for after, waits in enumerate(step.plan.predecessors) for before in sorted(waits)]
    before, after = (np.array([edge[side] for edge in edges], int) for side in (0, 1))
    lines = np.arange(len(edges))
    program.at_least(
        core[after],
        (lines, end[after], np.ones(len(edges))),
        (lines, end[before], -np.ones(len(edges))),
        (lines, share[after], (core - gpu)[after]),
    )
    return scale * float(program.minimise((time, np.ones(1)), method="highs-ipm")[time[0]])


def capacity_bound(step: Job, gpus: int, cores: int) -> float:
    """Return the bound without predecessors in seconds."""
    core, gpu = np.array(step.core), np.array(step.gpu)
    order = np.argsort(-core / gpu, kind="stable")
    on_gpus = np.concatenate([[0.0], np.cumsum(gpu[order])]) / gpus
    on_cores = (core.sum() - np.concatenate([[0.0], np.cumsum(core[order])])) / cores
    first = int(np.argmax(on_gpus >= on_cores))  # of the tasks, one is cut in two so that both kinds end at once
    share = (on_cores[first - 1] - on_gpus[first - 1]) / (on_gpus[first] - on_gpus[first - 1] + on_cores[first - 1] - on_cores[first])
    return float(on_gpus[first - 1] + share * (on_gpus[first] - on_gpus[first - 1]))


def compared(name: str, step: Job, machines: Sequence[tuple[int, int]], say: Callable[[object], None]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a job, and its figures."""
    rows, cases = [], {}
    for gpus, cores in machines:
        alone = {"GPUs": seconds_of(step, gpus, 0), "cores": seconds_of(step, 0, cores)}
        mixed, least = seconds_of(step, gpus, cores), (bound if len(step.core) <= SOLVED else capacity_bound)(step, gpus, cores)
        what = f"{name}, {gpus} GPU{'s' * (gpus > 1)} and {cores} cores"
        cases[what] = {**alone, "mixed": mixed, "bound": least}
        rows.append(common.compare(what, "s a step", mixed, "the better alone", min(alone.values()), better="less", bar="ratio <= 1.0"))
        rows.append(common.compare(what, "s a step", mixed, "lower bound", least, better="less", bar="ratio <= 1.05"))
        say(rows[-2:])
    return rows, cases


def main() -> None:
    """Run both jobs."""
    parser = common.parser(__doc__, "mixed")
    parser.add_argument("--tiny", action="store_true", help="small jobs on a small machine; nothing is kept")
    parser.add_argument("--rounds", type=int, default=1, help="ignored: virtual time is always the same")
    args: argparse.Namespace = parser.parse_args()
    before, machines = common.machine(), ((1, 2),) if args.tiny else MACHINES
    if args.tiny:
        jobs = {"Cholesky, 4 x 4 tiles": cholesky(4), "tiny": language_model(ModelSettings(model="tiny"), 1, TilingSettings(batch=4, minibatch=2))}
    else:
        tiling = TilingSettings(batch=128, minibatch=128, minibatch_tile=1, vocab_tile=6283, lanes=8)
        layers = {number: language_model(ModelSettings(model="gpt2", seq_len=512), number, tiling) for number in (2, 12)}
        jobs = {"Cholesky, 40 x 40 tiles": cholesky(40), **{f"GPT-2 small, {number} layers": step for number, step in layers.items()}}
    found = [compared(name, step, machines, lambda rows: print(*rows, sep="\n", file=sys.stderr, flush=True)) for name, step in jobs.items()]
    rows, cases = [row for rows, _ in found for row in rows], {what: case for _, cases in found for what, case in cases.items()}
    common.finish(args.output, before, ("numpy", "scipy"), {"rounds": 1}, rows, keep=not args.tiny, cases=cases)


if __name__ == "__main__":
    main()
