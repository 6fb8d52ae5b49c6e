"""CPU workers that stand aside: they run what is for them alone, under every policy, and plans count their tasks in RAM and not on devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scheduler import RW, SCRATCH, Codelet, Handle, R, Runtime, W
from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.core.policies import POLICIES
from scheduler.core.step_plan import StepPlan
from scheduler.planning import AUTO, NONE, PlanningMachine, choose_plan
from scheduler.planning.forecast import Forecast, Pace, forecast
from scheduler.planning.tile_traffic import Touches
from scheduler.simulation.virtual_time import simulate

PAGE = 4096
PAGES = 4
TILE = PAGES * PAGE
LAYERS = 24


def fill(tile: np.ndarray, *, value: float) -> None:
    """A value everywhere."""
    tile[:] = value


def gradient(weight: np.ndarray, grad: np.ndarray) -> None:
    """Something that follows from the weight."""
    grad[:] = weight * 2 + 1


def update(grad: np.ndarray, state: np.ndarray, weight: np.ndarray, scratch: np.ndarray) -> None:
    """Momentum."""
    scratch[:] = 1
    state *= 0.5
    state += grad
    weight -= state * 0.125


FILL = Codelet("fill", cpu=fill)
GRADIENT = Codelet("gradient", cpu=gradient)
UPDATE = Codelet("update", cpu=update, cpu_only=True)
ANYWHERE = Codelet("update", cpu=update)


def view(memory: Any, offset: int) -> np.ndarray:
    """A tile."""
    return np.frombuffer(memory, np.float32, TILE // 4, offset)


def tile(runtime: Any, name: str, kind: Any = "temporary") -> Handle:
    """A handle of so many pages."""
    found: Handle = runtime.handle(TILE, view, name=name, kind=kind)
    return found


class Step:
    """A gradient and an update of each layer."""

    def __init__(self, runtime: Any, codelet: Codelet) -> None:
        self.weights = [tile(runtime, f"w{at}", "persistent") for at in range(LAYERS)]
        self.states = [tile(runtime, f"m{at}", "persistent") for at in range(LAYERS)]
        for at, handle in enumerate([*self.weights, *self.states]):
            runtime.submit(FILL, [(handle, W)], {"value": float(at)})
        with runtime.record() as self.step:
            for weight, state in zip(self.weights, self.states, strict=True):
                grad = tile(runtime, "gradient")
                runtime.submit(GRADIENT, [(weight, R), (grad, W)])
                runtime.submit(codelet, [(grad, R), (state, RW), (weight, RW), (tile(runtime, "scratch"), SCRATCH)])
                del grad

    def values(self, runtime: Runtime, steps: int = 3) -> list[bytes]:
        """Weights after so many steps."""
        assert self.step is not None
        for _ in range(steps):
            ticket = self.step.replay()
        ticket.wait()
        found = []
        for weight in self.weights:
            with runtime.acquire(weight, R) as data:
                found.append(data.tobytes())
        return found


def captured(codelet: Codelet = UPDATE, *, aside: bool = True) -> StepPlan:
    """The step from shapes."""
    runtime = CapturingRuntime(aside=aside)
    Step(runtime, codelet)
    return runtime.plan


@pytest.mark.parametrize("policy", [*POLICIES])
@pytest.mark.parametrize("devices", [1, 2])
def test_results_under_every_policy(policy: str, devices: int) -> None:
    """Whatever the policy, at the least budgets, and nothing else runs on CPU workers than what only they may run."""
    with Runtime(1, ram=1 << 22) as runtime:
        expected = Step(runtime, ANYWHERE).values(runtime)
    plan = captured()
    ram = plan.minimum_bytes(is_last=True, computes=False)
    with Runtime(2, sim_gpus=devices, gpu_memory=plan.largest_task(), ram=ram, sched=policy, aside=True) as runtime:
        step = Step(runtime, UPDATE)
        assert step.values(runtime) == expected
        stats = runtime.stats()
        found = step.step.plan
        assert found is not None
        assert {task.kinds for task in found.tasks if task.name == "gradient"} == {("sim",)}
    assert all(stats["peak_bytes"][name] <= stats["budget_bytes"][name] for name in stats["peak_bytes"])


def test_what_a_plan_counts_where() -> None:
    """On a device two tiles at once and the weights; in RAM all that lives, with the scratch of an update and without that of other tasks."""
    plan, other = captured(), captured(ANYWHERE, aside=False)
    assert plan.largest_task() == 2 * TILE
    assert plan.largest_task(aside=True) == 4 * TILE
    assert plan.needed_bytes() == (LAYERS + 1) * TILE
    assert plan.minimum_bytes(is_last=True, computes=False) == (2 * LAYERS + 2) * TILE
    assert other.needed_bytes() == (2 * LAYERS + 2) * TILE
    assert other.minimum_bytes(is_last=True, computes=False) == (2 * LAYERS + 1) * TILE


def pace(plan: StepPlan, device: float, cpu: float, rate: float) -> Pace:
    """Tasks of so many seconds on a device and aside, and links of so many tiles a second."""
    beside = {task for task, is_beside in zip(plan.tasks, plan.aside, strict=True) if is_beside}
    seconds = {task: 0.0 if task in beside else device for task in plan.tasks}
    return Pace(seconds, rate * TILE, rate * TILE, duplex=True, aside=dict.fromkeys(beside, cpu))


def seconds_of(device: float, cpu: float, rate: float) -> tuple[Forecast, float]:
    """Forecast and virtual time of the step on one device that holds half of the weights."""
    plan = captured()
    budget = LAYERS * TILE // 2
    found = forecast(Touches(plan), range(len(plan.tasks)), budget, pace(plan, device, cpu, rate), share=1.0)
    virtual = simulate(
        plan,
        workers=[("sim", 1, 3), ("cpu", 0, 2)],
        nodes=[("ram", 1 << 30), ("gpu", budget)],
        policy="prio",
        duration=lambda task, kind: 0.0 if task.step is None else cpu if kind == "cpu" else device,
        transfer=lambda source, target, nbytes: nbytes / (rate * TILE),
        replays=4,
        ahead=True,
        aside=True,
    )
    return found, virtual.seconds


@pytest.mark.parametrize(
    ("device", "cpu", "rate", "least"),
    [(1.0, 0.1, 100.0, LAYERS * 1.0), (0.1, 1.0, 100.0, LAYERS * 1.0), (0.1, 0.1, 1.0, LAYERS * 1.0)],
    ids=["device", "cpu", "links"],
)
def test_forecast_and_virtual_time(device: float, cpu: float, rate: float, least: float) -> None:
    """What is slowest decides: the device, the CPU workers, or a link, which each weight goes up and each gradient comes down; nothing is counted
    twice."""
    found, virtual = seconds_of(device, cpu, rate)
    assert found.read == LAYERS * TILE
    assert found.written == LAYERS * TILE
    assert least * 0.99 <= found.seconds <= least + 2 * (device + cpu + 1 / rate)
    assert found.seconds == pytest.approx(virtual, rel=0.2)


def test_a_step_with_updates_aside_is_always_forecast() -> None:
    """Although it fits, what it moves is known."""
    plan = captured()
    found = choose_plan(
        plan, AUTO, NONE, PlanningMachine(memory=1 << 40, last=1 << 40, computes_on_last=False, pace=lambda each: pace(each, 1.0, 0.1, 100.0))
    )
    assert found.moved_bytes == 2 * LAYERS * TILE
    assert found.seconds > 0


def test_workers_stand_aside_of_devices_only() -> None:
    """Without a device nobody would run the rest; without CPU workers nobody runs what is for them."""
    with pytest.raises(ValueError, match="CPU workers and no device"):
        Runtime(1, ram=1 << 22, aside=True)
    with Runtime(0, sim_gpus=1, gpu_memory=1 << 22, ram=1 << 22) as runtime, pytest.raises(ValueError, match="runs on cpu, and there are only sim"):
        Step(runtime, UPDATE)


def test_workers_placed_by_hand_do_not_stand_aside() -> None:
    """A task that the program has placed on a CPU worker is none of the tasks aside; nor is one for CPU workers alone where these run anything."""
    runtime = CapturingRuntime(workers=["cpu:0"], aside=True)
    with runtime.place("cpu:0"):
        Step(runtime, ANYWHERE)
    assert {task.kinds for task in runtime.plan.tasks} == {("cpu",)}
    assert not runtime.plan.has_aside
    plan = captured(UPDATE, aside=False)
    assert ("cpu",) in {task.kinds for task in plan.tasks}
    assert not plan.has_aside
