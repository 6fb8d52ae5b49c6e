"""Capturing a step without a runtime: the plan that the real one would record."""

from __future__ import annotations

import pytest
from support.plans import shape_of

from scheduler import RecordingError, Runtime, TaskRuntime
from scheduler.api.capturing_runtime import CapturingRuntime


def emit(runtime: TaskRuntime, kit, weight, source):  # type: ignore[no-untyped-def]
    """Two tasks, a sum in lanes, and an output."""
    total = kit.handle(runtime, "total", 8)
    for _ in range(3):
        part = kit.handle(runtime, "part", 8)
        runtime.submit(kit.plus, [(weight, "R"), (source, "R"), (part, "W")])
        runtime.submit(kit.add, [(total, "REDUX"), (part, "R")])
    return total


@pytest.mark.parametrize("lanes", [1, 2])
def test_it_captures_what_the_runtime_records(kit, lanes: int) -> None:  # type: ignore[no-untyped-def]
    """Tasks, dependencies, lifetimes, copies of inputs and combined lanes are the same."""
    plans = []
    for runtime in (CapturingRuntime(lanes), Runtime(1, ram=1 << 20, lanes=lanes)):
        weight = kit.filled(runtime, 1, "weight", 8, kind="persistent")
        source = kit.filled(runtime, 1, "source", 8, kind="input")
        if isinstance(runtime, CapturingRuntime):
            with runtime.record():
                total = emit(runtime, kit, weight, source)
            plans.append(runtime.plan)
        else:
            with runtime, runtime.record() as step:
                total = emit(runtime, kit, weight, source)
            plans.append(step.plan)
        assert total.record is not None
    assert shape_of(plans[0]) == shape_of(plans[1])
    assert plans[0].tasks[0].kinds == ("cpu", "sim", "cuda")


def test_outside_a_block_nothing_is_kept(kit) -> None:  # type: ignore[no-untyped-def]
    """Tasks before the block are dropped, and there is no plan before it has ended."""
    runtime = CapturingRuntime()
    weight = kit.filled(runtime, 1, "weight", 8, kind="persistent")
    runtime.submit(kit.fill, [(weight, "W")], {"value": 1.0})
    with pytest.raises(RecordingError, match="nothing has been captured"):
        _ = runtime.plan
    with runtime.record():
        assert runtime.recording
    assert runtime.plan.tasks == []
