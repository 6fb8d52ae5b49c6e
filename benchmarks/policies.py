"""Scheduling policies in virtual time: the same programs on imaginary machines under every policy. Takes a few minutes and measures nothing real.

    python benchmarks/policies.py [--output FILE] [POLICY ...]

Programs: a tiled matrix product, a Cholesky factorization, and training steps of two multilayer perceptrons over several minibatches. Machines: 1, 2
or 4 devices with and without two CPU workers a quarter as fast, four budgets of device memory (the last has room for everything), two link speeds.
A case's figure is the seconds of a step over those of the best policy in that case; the table shows geometric means.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Final

from scheduler import RW, Kind, Mode, R, SchedulerError, W
from scheduler.machine import PAGE, POLICIES, HandleId, HandleRecord, NodeId, RecordedTask, StepPlan, Task, WorkerKind
from scheduler.simulation import simulate

SPEEDS: Final[dict[WorkerKind, float]] = {"cpu": 1.0, "sim": 4.0, "host": math.inf}
SECONDS_PER_PAGE: Final = (0.08, 0.3)


class Program:
    """Tasks over tiles, in the order of submission."""

    def __init__(self) -> None:
        self.tasks: list[RecordedTask] = []
        self.owned: dict[HandleRecord, bool] = {}

    def tile(self, name: str, pages: int = 1, kind: Kind = "persistent") -> HandleRecord:
        """A tile of so many pages; a temporary one dies with the step."""
        tile = HandleRecord(HandleId(0), pages * PAGE, pages * PAGE, None, name, kind, "activations")
        if kind == "temporary":
            self.owned[tile] = False
        return tile

    def add(self, name: str, seconds: float, *accesses: tuple[HandleRecord, Mode], priority: int = 0) -> None:
        """A task that takes so many seconds on a CPU worker."""
        self.tasks.append(RecordedTask(None, name, ("cpu", "sim"), accesses, {"seconds": seconds}, priority))

    @property
    def plan(self) -> StepPlan:
        """The recorded step."""
        return StepPlan(self.tasks, self.owned)


def matmul(n: int) -> StepPlan:
    """C = A B over n x n tiles."""
    program = Program()
    a, b, c = ({at: program.tile(f"{name}{at}") for at in product(range(n), repeat=2)} for name in "abc")
    for i, j, k in product(range(n), repeat=3):
        program.add("gemm", 1.0, (a[i, k], R), (b[k, j], R), (c[i, j], RW if k else W))
    return program.plan


def cholesky(n: int) -> StepPlan:
    """A = L L^T over the lower n x n tiles, with priorities along the critical path."""
    program = Program()
    a = {(i, j): program.tile(f"a{i, j}") for i in range(n) for j in range(i + 1)}
    for k in range(n):
        program.add("potrf", 1 / 3, (a[k, k], RW), priority=3)
        for i in range(k + 1, n):
            program.add("trsm", 1.0, (a[k, k], R), (a[i, k], RW), priority=2 if i == k + 1 else 1)
        for i in range(k + 1, n):
            program.add("syrk", 1.0, (a[i, k], R), (a[i, i], RW), priority=2 if i == k + 1 else 0)
            for j in range(k + 1, i):
                program.add("gemm", 2.0, (a[i, k], R), (a[j, k], R), (a[i, j], RW))
    return program.plan


def perceptron(layers: int, minibatches: int, tiles: int) -> StepPlan:
    """Forward, backward and update of `layers` layers, each cut into columns of `tiles` weight tiles of four pages."""
    program = Program()
    weights = [[program.tile(f"w{layer, c}", 4) for c in range(tiles)] for layer in range(layers)]
    sums = [[program.tile(f"g{layer, c}", 4, "temporary") for c in range(tiles)] for layer in range(layers)]
    for m in range(minibatches):
        values = [[program.tile(f"x{m}")]]
        for layer in range(layers):
            outputs = [program.tile(f"a{m, layer, c}", 1, "temporary") for c in range(tiles)]
            for weight, output in zip(weights[layer], outputs, strict=True):
                program.add("forward", 1.0, *[(value, R) for value in values[-1]], (weight, R), (output, W))
            values.append(outputs)
        slopes = values[-1]
        for layer in reversed(range(layers)):
            for slope, total in zip(slopes, sums[layer], strict=True):
                program.add("dw", 1.0, *[(value, R) for value in values[layer]], (slope, R), (total, RW if m else W))
            inner = [program.tile(f"d{m, layer, c}", 1, "temporary") for c in range(tiles if layer else 0)]
            for out in inner:
                program.add("dx", 1.0, *[(slope, R) for slope in slopes], *[(weight, R) for weight in weights[layer]], (out, W))
            slopes = inner
    for total, weight in zip(chain.from_iterable(sums), chain.from_iterable(weights), strict=True):
        program.add("update", 0.1, (total, R), (weight, RW))
    return program.plan


PROGRAMS: Final = {
    "matmul": (matmul(7), (22, 36, 70, 400)),
    "cholesky": (cholesky(10), (16, 26, 40, 400)),
    "perceptron": (perceptron(5, 4, 3), (45, 60, 90, 1000)),
    "wide perceptron": (perceptron(4, 4, 4), (50, 70, 110, 1000)),
}
"""Name -> (step, device budgets in pages, the last with room for everything)."""


def cases() -> Iterator[tuple[str, bool, StepPlan, list[tuple[WorkerKind, int, int]], list[tuple[str, int]], float]]:
    """(name, whether memory is tight, step, workers, nodes, seconds per page)."""
    for (name, (plan, budgets)), devices, cpus, speed in product(PROGRAMS.items(), (1, 2, 4), (0, 2), SECONDS_PER_PAGE):
        workers: list[tuple[WorkerKind, int, int]] = [("cpu", 0, 1)] * cpus
        workers += [("sim", 1 + at, 2) for at in range(devices)]
        for budget in budgets:
            nodes = [("ram", 6000 * PAGE), *((f"gpu{at}", budget * PAGE) for at in range(devices))]
            yield f"{name}, {devices} devices", budget != budgets[-1], plan, workers, nodes, speed


def duration(task: Task, kind: WorkerKind) -> float:
    """Seconds of a task; loading takes none."""
    seconds = task.constants.get("seconds", 0.0)
    assert isinstance(seconds, float)
    return seconds / SPEEDS[kind]


def measure(policies: list[str]) -> dict[str, dict[str, float]]:
    """Policy -> heading -> geometric mean of the time over the best policy's."""
    logs: dict[str, dict[str, list[float]]] = {policy: {} for policy in policies}
    for name, is_tight, plan, workers, nodes, speed in cases():

        def transfer(source: NodeId, target: NodeId, nbytes: int, speed: float = speed) -> float:
            return nbytes / PAGE * speed

        try:
            seconds = {
                policy: simulate(plan, workers=workers, nodes=nodes, policy=policy, duration=duration, transfer=transfer).seconds
                for policy in policies
            }
        except SchedulerError as error:
            print(f"left out: {name}: {error}")
            continue
        best = min(seconds.values())
        for policy, taken in seconds.items():
            for heading in ("tight" if is_tight else "roomy", f"{name}, {'tight' if is_tight else 'roomy'}"):
                logs[policy].setdefault(heading, []).append(math.log(taken / best))
    return {policy: {heading: math.exp(sum(values) / len(values)) for heading, values in found.items()} for policy, found in logs.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", choices=[*POLICIES, []], help="which; all by default")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    result = measure(arguments.policies or list(POLICIES))
    headings = sorted(next(iter(result.values())))
    print(f"{'':32}", *(f"{policy:>7}" for policy in result))
    for heading in headings:
        print(f"{heading:32}", *(f"{found[heading]:7.3f}" for found in result.values()))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
