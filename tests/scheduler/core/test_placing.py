"""`Runtime.place`: tasks run where the program wants them, under every policy, and the impossible is refused before anything runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from scheduler import RW, Codelet, DoesNotFit, PlacementError, R, Runtime, W
from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.core.policies import POLICIES
from scheduler.simulation.virtual_time import simulate
from scheduler.testing import FakeDriver

MIB = 1 << 20
PAGE = 4096


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_tasks_run_where_they_are_placed(kit: Any, policy: str) -> None:
    """Submitted and recorded, the innermost block counts, and the numbers are the same."""
    ran: dict[str, set[str]] = {}

    with Runtime(1, sim_gpus=2, ram=MIB, sched=policy) as runtime:
        tiles = [kit.filled(runtime, 1, name, kind="persistent") for name in ("a", "b", "c", "d")]

        def work() -> None:
            runtime.submit(kit.double, [(tiles[0], RW)])
            with runtime.place("sim:1"):
                runtime.submit(kit.double, [(tiles[1], RW)])
                with runtime.place("cpu:0"):
                    runtime.submit(kit.double, [(tiles[2], RW)])
                runtime.submit(kit.double, [(tiles[3], RW)])

        runtime.on_task(lambda task: ran.setdefault(task.tiles[0].name, set()).add(task.worker))
        for _ in range(5):
            work()
        with runtime.record() as step:
            work()
        for _ in range(5):
            ticket = step.replay()
        ticket.wait()
        assert {name: ran[name] for name in ("b", "c", "d")} == {"b": {"sim:1"}, "c": {"cpu:0"}, "d": {"sim:1"}}
        assert [kit.value(runtime, tile) for tile in tiles] == [2.0**10] * 4


def test_a_whole_step_of_parts_can_be_placed_elsewhere(kit: Any) -> None:
    """Minibatches that would be spread over two devices all run on the second; the order of a step short of memory respects it too."""
    where: set[str] = set()
    with Runtime(0, sim_gpus=2, ram=MIB, gpu_memory=5 * PAGE) as runtime:
        weight = kit.filled(runtime, 1, "w", kind="persistent")
        inputs = [kit.filled(runtime, at, f"x{at}", kind="input") for at in range(4)]
        total = kit.handle(runtime, "total", kind="persistent")
        with runtime.record() as step, runtime.place("sim:1"):
            for at, x in enumerate(inputs):
                y = kit.handle(runtime, "y")
                runtime.submit(kit.plus, [(x, R), (weight, R), (y, W)])
                runtime.submit(kit.add if at else COPY, [(total, RW), (y, R)] if at else [(y, R), (total, W)])
        assert step.plan is not None
        assert set(step.plan.partitions) <= {-1}
        runtime.on_task(lambda task: where.add(task.worker) if task.name != "copy input" else None)
        for _ in range(3):
            step.replay().wait()
        assert kit.value(runtime, total) == 0 + 1 + 2 + 3 + 4
    assert where == {"sim:1"}


COPY = Codelet("copy", cpu=lambda x, out: out.__setitem__(slice(None), x))


def test_the_impossible_is_refused_before_it_runs(kit: Any) -> None:
    """No such worker, no implementation for it, data beyond its memory: the rule, the values, what to do; submitted and recorded alike."""
    with Runtime(1, sim_gpus=1, ram=MIB, gpu_memory=2 * PAGE) as runtime:
        data = [kit.filled(runtime, 1, f"d{at}") for at in range(3)]
        with pytest.raises(PlacementError, match=r"name of a worker of this runtime, got 'sim:1'; name one of cpu:0, sim:0"), runtime.place("sim:1"):
            pass
        device = Codelet("device only", cuda=kit.broken)
        refusals = (
            (device, data[:1], PlacementError, r"'device only'\) was placed on sim:0 and runs on cuda; give it an implementation for sim workers"),
            (kit.empty, data, DoesNotFit, r"empty needs 12,288 B at once .*, more than the 8,192 B of sim:0, on which it was placed; raise"),
        )
        for codelet, handles, kind, words in refusals:
            with pytest.raises(kind, match=words) as refusal, runtime.place("sim:0"):
                runtime.submit(codelet, [(handle, R) for handle in handles])
            error = refusal.value
            if isinstance(error, PlacementError):
                assert (error.worker, error.codelet, error.kinds) == ("sim:0", "device only", ("cuda",))
            else:
                assert (error.shortage.cause, error.shortage.node, error.shortage.needed, error.shortage.pin) == ("task", "sim:0", 3 * PAGE, "sim:0")
            with pytest.raises(kind, match=words), runtime.record(), runtime.place("sim:0"):
                runtime.submit(codelet, [(handle, R) for handle in handles])
        runtime.submit(kit.empty, [(handle, R) for handle in data])  # elsewhere it fits, and the failed blocks have left no pin behind
        runtime.wait()


def test_blocks_belong_to_their_thread_and_leave_nothing_behind(kit: Any) -> None:
    """Another thread's tasks go where they like, and blocks that are left out of order, as generators may, end all the same."""
    ran: list[tuple[str, str]] = []
    with Runtime(1, sim_gpus=1, ram=MIB) as runtime:
        runtime.on_task(lambda task: ran.append((task.tiles[0].name, task.worker)))

        def fill(name: str) -> None:
            runtime.submit(kit.fill, [(kit.handle(runtime, name), W)], {"value": 0.0})
            runtime.wait()

        outer, inner = runtime.place("sim:0"), runtime.place("cpu:0")
        outer.__enter__()
        others = runtime.place("cpu:0")
        thread = threading.Thread(target=others.__enter__)  # and never leaves it
        thread.start()
        thread.join()
        fill("outer")
        inner.__enter__()
        fill("inner")
        outer.__exit__(None, None, None)
        fill("inner")
        inner.__exit__(None, None, None)
        with runtime.record() as step:
            runtime.submit(kit.fill, [(kit.handle(runtime, "nowhere"), W)], {"value": 0.0})
        assert step.plan is not None
        assert [task.pin for task in step.plan.tasks] == [None]
    assert ran == [("outer", "sim:0"), ("inner", "cpu:0"), ("inner", "cpu:0")]


def test_capturing_refuses_what_a_run_refuses(kit: Any) -> None:
    """A codelet without an implementation for the worker it is placed on."""
    device = Codelet("device only", cuda=kit.broken)
    captured = CapturingRuntime(workers=("cpu:0", "sim:0"))
    with Runtime(1, sim_gpus=1, ram=MIB) as runtime:
        for each in (captured, runtime):
            words = r"'device only'\) was placed on sim:0 and runs on cuda; give it an implementation for sim workers"
            with pytest.raises(PlacementError, match=words), each.record(), each.place("sim:0"):
                each.submit(device, [(kit.handle(each), W)])


def test_placed_tasks_of_one_worker_keep_their_priority(kit: Any) -> None:
    """Of the tasks that wait for a worker the most urgent goes first, then the oldest."""
    order: list[str] = []
    gate, opened = kit.gate()
    with Runtime(2, ram=MIB) as runtime, runtime.place("cpu:0"):
        runtime.submit(gate, [(kit.handle(runtime), W)])
        for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
            runtime.submit(kit.fill, [(kit.handle(runtime, name), W)], {"value": 0.0}, priority=priority)
        runtime.on_task(lambda task: order.append(task.tiles[0].name))
        opened()
        runtime.wait()
    assert order[1:] == ["b", "d", "a", "c"]


def test_placement_is_planned(kit: Any) -> None:
    """A captured step keeps its placement, and virtual time respects it: two tasks on one of two devices take twice as long."""

    def seconds(place: tuple[str, str]) -> float:
        runtime = CapturingRuntime(workers=("sim:0", "sim:1"))
        tiles = [kit.handle(runtime, name, kind="persistent") for name in ("a", "b")]
        with runtime.record():
            for tile, worker in zip(tiles, place, strict=True):
                with runtime.place(worker):
                    runtime.submit(kit.fill, [(tile, W)], {"value": 0.0})
        found = simulate(
            runtime.plan,
            workers=[("sim", 1, 2), ("sim", 2, 2)],
            nodes=[("ram", MIB), ("sim:0", MIB), ("sim:1", MIB)],
            policy="reuse",
            duration=lambda task, kind: 1.0,
        )
        return found.seconds

    assert seconds(("sim:0", "sim:1")) == 1
    assert seconds(("sim:1", "sim:1")) == 2


def test_a_blocked_task_waits_for_its_own_worker() -> None:
    """Of two workers on one node the idle one may not take a task for which there is room again, if it is pinned to the other."""
    driver = FakeDriver([5], [("cpu", 0, 1), ("cpu", 0, 1)])
    small, large, other = driver.handle(1), driver.handle(3), driver.handle(2)
    driver.submit((small, W))
    driver.drain()
    first = driver.submit((large, W), pin=1)
    blocked = driver.submit((other, W), (driver.handle(1), W), pin=0)
    assert blocked.task.state == "blocked"
    driver.submit((small, RW), pin=0)  # needs no new memory
    driver.release(large)
    driver.finish(first)
    assert blocked.task.state == "blocked"
    driver.drain()
    assert blocked.task.worker == 0
    driver.check()


def test_a_task_too_large_for_its_node_goes_nowhere_else() -> None:
    """It fails, although another device of that kind has room; the machine's own refusal, for those that submit to it directly."""
    driver = FakeDriver([16, 2, 6], [("sim", 1, 2), ("sim", 2, 2)])
    run = driver.submit((driver.handle(3), W), kinds=("sim",), pin=0)
    driver.drain()
    assert isinstance(run.error, DoesNotFit)
    assert driver.submit((driver.handle(3), W), kinds=("sim",), pin=1).task.worker == 1
    driver.drain()
    driver.check()
