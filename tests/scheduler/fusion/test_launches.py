"""Launches of a fused task: chains of tasks that one kernel computes, at a place where no other task is in their way."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.late_gpu import FILL, Numbers, both, gpus, value

from scheduler import Codelet, R, Runtime, TaskRuntime, W
from scheduler.api.inline_runtime import InlineRuntime
from scheduler.core.codelet import KernelChain, Link

PAGE = 4096
Tasks = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
DOUBLE = both("double", lambda source, out: np.multiply(source, 2, out=out))
TOTAL = both("total", lambda one, other, out: np.add(one, other / 3, out=out))
STORE = both("store", lambda source, out: np.add(source, 1, out=out))


class Chained:
    """The codelets, of which the first ones begin chains.

    Attributes:
        num_private, num_shared: number of chains that have run, with and without a private result.
    """

    def __init__(self) -> None:
        self.num_private = self.num_shared = 0
        assert DOUBLE.cuda is not None
        assert TOTAL.cuda is not None
        two, three = (DOUBLE.cuda, TOTAL.cuda), (DOUBLE.cuda, TOTAL.cuda, TOTAL.cuda)
        links = (Link(0, 1, 1, 0, True), Link(1, -1, 2, 1))
        chains = [KernelChain(three, links, self.run), KernelChain(two, links[:1], self.run), KernelChain(two, (Link(0, 1, 1, 1),), self.run)]
        self.double = Codelet("double", cpu=DOUBLE.cpu, cuda=DOUBLE.cuda, chains=chains)

    def run(self, tasks: Tasks) -> None:
        """Run one after another; a private result becomes NaN afterwards, as if it had never been written."""
        for codelet, (views, constants) in zip((DOUBLE, TOTAL, TOTAL), tasks, strict=False):
            codelet.cuda(*views, **constants)  # type: ignore[misc]
        (_, first), (then, *_) = tasks[0][0], tasks[1][0]
        if then.address == first.address:
            self.num_private += 1
            FILL.cuda(first, value=np.nan)  # type: ignore[misc]
        else:
            self.num_shared += 1


def emit(runtime: TaskRuntime, double: Codelet, kept: list[Any], seed: int) -> None:
    """A step over kept data and temporaries chosen by chance."""
    chance, passing = random.Random(seed), list[Any]()
    for _ in range(60):
        known = [*kept, *passing[-5:]]
        action = chance.randrange(5)
        if action == 0:
            runtime.submit(STORE, [(chance.choice(passing or kept), R), (chance.choice(kept), W)] if passing else [(kept[0], R), (kept[1], W)], {})
            continue
        fresh = runtime.handle(PAGE, Numbers(), name="passing")
        if action < 3:
            runtime.submit(double, [(chance.choice(known), R), (fresh, W)], {})
        elif len(known) > 1:
            one, other = chance.sample(known, 2)
            runtime.submit(TOTAL, [(passing[-1] if passing and other is not passing[-1] else one, R), (other, R), (fresh, W)], {})
        passing.append(fresh)
    runtime.submit(STORE, [(passing[-1], R), (kept[0], W)], {})


def results(runtime: Any, double: Codelet, seed: int) -> list[float]:
    """Kept data after three replays of a step."""
    with runtime:
        kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(3)]
        for number, handle in enumerate(kept):
            runtime.submit(FILL, [(handle, W)], {"value": 1.0 + number})
        with runtime.record() as step:
            emit(runtime, double, kept, seed)
        for _ in range(3):
            step.replay()
        return [value(runtime, handle) for handle in kept]


def eager(seed: int) -> list[float]:
    """The same without recording."""
    runtime = InlineRuntime()
    kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(3)]
    for number, handle in enumerate(kept):
        runtime.submit(FILL, [(handle, W)], {"value": 1.0 + number})
    for _ in range(3):
        emit(runtime, DOUBLE, kept, seed)
    return [value(runtime, handle) for handle in kept]


@pytest.mark.parametrize("seeds", [range(0, 10), range(10, 20)])
def test_chains_leave_the_results_of_single_tasks(seeds: range) -> None:
    """In random steps, where chains have tasks between them that they must pass, or must not."""
    chained = Chained()
    for seed in seeds:
        assert results(Runtime(0, gpus=gpus(1, seed), gpu_memory=256 * PAGE, ram=512 * PAGE), chained.double, seed) == eager(seed)
    assert chained.num_private
    assert chained.num_shared


@pytest.mark.parametrize(("reads_again", "expected"), [(False, (1, 0)), (True, (0, 0))])
def test_a_result_that_others_read_is_not_private(reads_again: bool, expected: tuple[int, int]) -> None:
    """A chain that leaves a result unwritten runs if only its own tasks read that result."""
    chained = Chained()
    with Runtime(0, gpus=gpus(1, 0), gpu_memory=256 * PAGE, ram=512 * PAGE) as runtime:
        kept = [runtime.handle(PAGE, Numbers(), kind="persistent") for _ in range(3)]
        for handle in kept:
            runtime.submit(FILL, [(handle, W)], {"value": 1.0})
        with runtime.record() as step:
            doubled, total = (runtime.handle(PAGE, Numbers()) for _ in range(2))
            runtime.submit(chained.double, [(kept[0], R), (doubled, W)], {})
            runtime.submit(TOTAL, [(doubled, R), (kept[0], R), (total, W)], {})
            runtime.submit(STORE, [(total, R), (kept[1], W)], {})
            if reads_again:
                runtime.submit(STORE, [(doubled, R), (kept[2], W)], {})
            del doubled, total
        step.replay()
        assert value(runtime, kept[1]) == pytest.approx(512 * (3 + 1 / 3))
        assert value(runtime, kept[2]) == 512 * (3.0 if reads_again else 1.0)
    assert (chained.num_private, chained.num_shared) == expected
