"""Bars of the claims about memory, on steps small enough for every run: bytes moved beside the linear program and beside eager and LRU.

The same on GPT-2 and on imaginary devices that hold it: `benchmarks/memory/foresight.py`.
"""

from __future__ import annotations

from functools import cache

import pytest
from support.bounds import byte_bound, trace_of

from nntask.config.settings import ModelSettings, TilingSettings, TrainSettings
from nntask.models.gpt2 import GPT2Config
from scheduler.core.performance_model import Models
from scheduler.core.step_plan import StepPlan
from scheduler.planning import AUTO, NONE, PlannedOrder, PlanningMachine, choose_plan
from scheduler.planning.ordered_step import SUBMISSION
from scheduler.simulation.virtual_time import Simulation, simulate
from wrappers.cli.bench.kernels import captured

CONFIG = GPT2Config(vocab_size=4096, n_positions=256, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
BOUNDLESS = 1 << 50


@cache
def step(minibatches: int, width: int) -> StepPlan:
    """A step of minibatches of one sequence, in square tiles of that width."""
    cut = TilingSettings(batch=minibatches, minibatch=1, seq_tile=256, embd_tile=width, inner_tile=2 * width, head_tile=-1, vocab_tile=1024)
    return captured(TrainSettings(model=ModelSettings(config_path="small.json"), tiling=cut), CONFIG)


def run(order: PlannedOrder, nodes: list[tuple[str, int]], policy: str, eviction: str, *, storage: bool) -> Simulation:
    """Two replays in virtual time; without a disk tasks run on the devices."""
    devices = range(1, len(nodes))
    return simulate(
        order.plan,
        workers=[("cpu", 0, 1)] if storage else [("sim", at, 3) for at in devices],
        nodes=nodes,
        policy=policy,
        duration=Models().task_seconds,
        transfer=lambda source, target, nbytes: 1e-5 + nbytes / 4e9,
        storage=storage,
        channels=4,
        eviction=eviction,
    )


REASON = "at half of the memory a step moves 1.155 times the bound: some data is written early, and not read again"
MISSED = pytest.mark.xfail(strict=True, reason=REASON)


@pytest.mark.parametrize("part", [4, 3, pytest.param(2, marks=(pytest.mark.long, MISSED))])
def test_few_bytes(part: int) -> None:
    """The planned order with next-use eviction moves at most 1.15 times the bound of that order, and 0.6 times what eager and LRU move."""
    plan = step(8, 256)
    budget = plan.needed_bytes() // part

    def moved(name: str, policy: str, eviction: str) -> tuple[PlannedOrder, int]:
        order = choose_plan(plan, name, NONE, PlanningMachine(memory=budget, last=BOUNDLESS, computes_on_last=False))
        found = run(order, [("ram", budget), ("disk", BOUNDLESS)], policy, eviction, storage=True)
        return order, sum(found.moved_bytes.values())

    order, ours = moved(AUTO, "prio", "next-use")
    bound = byte_bound.lower_bound(trace_of(order.plan, range(len(order.plan.tasks))), budget).total
    assert bound <= ours <= 1.15 * bound
    assert ours <= 0.6 * moved(SUBMISSION, "eager", "lru")[1]


@pytest.mark.long
def test_policies_pay() -> None:
    """Two imaginary devices: with room `reuse` is within 15 % of the area bound; with a third and a quarter it moves fewer bytes than eager and LRU.

    The claim's bar is half of their bytes; on GPT-2 XL it is 0.38 in minibatches of 2 sequences and 0.68 in those of 8 (`foresight.py`).
    """
    plan = step(8, 256)

    def on(memory: int, name: str, policy: str, eviction: str) -> Simulation:
        order = choose_plan(plan, name, NONE, PlanningMachine(memory=2 * memory, last=BOUNDLESS, computes_on_last=False, num_devices=2))
        return run(order, [("ram", BOUNDLESS), *((f"gpu:{at}", memory) for at in range(2))], policy, eviction, storage=False)

    roomy = on(1 << 34, AUTO, "reuse", "next-use")
    assert roomy.seconds <= 1.15 * sum(roomy.busy_seconds) / 2
    ours, theirs = (
        [on(plan.needed_bytes() // part // 2, *how) for part in (3, 4)] for how in ((AUTO, "reuse", "next-use"), (SUBMISSION, "eager", "lru"))
    )
    for one, other in zip(ours, theirs, strict=True):
        assert sum(one.moved_bytes.values()) <= 0.55 * sum(other.moved_bytes.values())
        assert one.seconds < other.seconds
