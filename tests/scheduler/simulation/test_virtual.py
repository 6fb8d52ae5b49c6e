"""Virtual time: known schedules take their known time, move their known bytes, and match what the real runtime needs."""

from __future__ import annotations

import pytest

from scheduler import Condition, DoesNotFit, Runtime, SchedulerError
from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.core.memory.extents import PAGE
from scheduler.core.records import Task, WorkerKind
from scheduler.simulation.virtual_time import simulate

MIB = 1 << 20


def one_second(task: Task, kind: WorkerKind) -> float:
    """Every task takes a second, on a device half of that."""
    return 1.0 if kind == "cpu" else 0.5


def record(kit, width: int, depth: int):  # type: ignore[no-untyped-def]
    """The plan of `width` chains of `depth` tasks over a shared weight of one page each."""
    with Runtime(1, ram=MIB) as runtime:
        weight = kit.filled(runtime, 1, "weight", 512, kind="persistent", data_class="parameters")
        with runtime.record() as step:
            ends = []
            for _ in range(width):
                now = kit.handle(runtime, "start", 512)
                runtime.submit(kit.plus, [(weight, "R"), (kit.handle(runtime, "", 512), "SCRATCH"), (now, "W")])
                for _ in range(depth - 1):
                    after = kit.handle(runtime, "next", 512)
                    runtime.submit(kit.plus, [(weight, "R"), (now, "R"), (after, "W")])
                    now = after
                ends.append(now)
        assert step.plan is not None
        before = {handle: dict(handle.replicas) for handle in step.plan.uses}
        yield step.plan
        assert before == {handle: dict(handle.replicas) for handle in step.plan.uses}


@pytest.mark.parametrize(("workers", "seconds"), [(1, 24.0), (2, 12.0), (4, 6.0), (9, 6.0)])
def test_makespan_of_independent_chains(workers: int, seconds: float, kit) -> None:  # type: ignore[no-untyped-def]
    """Four chains of six one-second tasks: bounded by work, then by the chain."""
    for plan in record(kit, 4, 6):
        result = simulate(plan, workers=[("cpu", 0, 1)] * workers, nodes=[("ram", MIB)], policy="eager", duration=one_second)
        assert result.seconds == seconds
        assert sum(result.busy_seconds) == 24.0
        assert (result.num_tasks, result.moved_bytes, result.num_evictions) == (24, {}, 0)


def test_peak_and_classes(kit) -> None:  # type: ignore[no-untyped-def]
    """One worker in submission order: the weight, two instances of the outputs, and the two ends of the running task."""
    for plan in record(kit, 4, 6):
        result = simulate(plan, workers=[("cpu", 0, 1)], nodes=[("ram", MIB)], policy="prio", duration=one_second)
        assert result.peak_bytes == {"ram": (1 + 4 + 4 + 2) * PAGE}
        assert result.peak_bytes_by_class["ram"]["parameters"] == PAGE


def test_the_next_replay_begins_before_one_ends(kit) -> None:  # type: ignore[no-untyped-def]
    """A chain and two workers: alone a replay has the two ends of its running task in memory, with the next one begun both replays have theirs."""
    for plan in record(kit, 1, 3):
        peaks = [
            simulate(plan, workers=[("cpu", 0, 1)] * 2, nodes=[("ram", MIB)], policy="eager", duration=one_second, ahead=ahead).peak_bytes["ram"]
            for ahead in (False, True)
        ]
        assert peaks == [5 * PAGE, 7 * PAGE]


def test_copies_take_their_links_time(kit) -> None:  # type: ignore[no-untyped-def]
    """A device without data fetches the weight once, at the bandwidth of the link; in the second replay it has it."""
    for plan in record(kit, 1, 4):
        machine = {"workers": [("sim", 1, 1)], "nodes": [("ram", MIB), ("gpu", MIB)], "policy": "prio", "duration": one_second}
        first = simulate(plan, **machine, transfer=lambda source, target, nbytes: 3 * nbytes / PAGE, replays=1)
        assert first.seconds == pytest.approx(3.0 + 4 * 0.5)
        assert first.moved_bytes == {"ram->gpu": PAGE}
        second = simulate(plan, **machine, transfer=lambda source, target, nbytes: 3 * nbytes / PAGE)
        assert second.seconds == pytest.approx(4 * 0.5)
        assert second.moved_bytes == {"ram->gpu": 0}


def test_budgets_bind(kit) -> None:  # type: ignore[no-untyped-def]
    """With the peak as budget the step runs in the same time; with too little it is refused by name."""
    for plan in record(kit, 4, 6):
        machine = {"workers": [("cpu", 0, 1)], "policy": "prio", "duration": one_second}
        peak = simulate(plan, nodes=[("ram", MIB)], **machine).peak_bytes["ram"]
        assert simulate(plan, nodes=[("ram", peak)], **machine).seconds == 24.0
        with pytest.raises(DoesNotFit, match=r"plus needs .* on node ram"):
            simulate(plan, nodes=[("ram", peak - PAGE)], **machine)


def test_data_that_does_not_fit_before_the_step(kit) -> None:  # type: ignore[no-untyped-def]
    """It is named with the sizes, as data of a task that brings it."""
    runtime = CapturingRuntime()
    one, two = (kit.filled(runtime, 1, name, 2 * PAGE // 8, kind="persistent") for name in ("one", "two"))
    with runtime.record():
        runtime.submit(kit.add, [(one, "RW"), (two, "R")])
    with pytest.raises(DoesNotFit, match=r"^load needs 8,192 B at once on node ram \(W one 8,192 B\), but of its budget of 12,288 B") as refusal:
        simulate(runtime.plan, workers=[("cpu", 0, 1)], nodes=[("ram", 3 * PAGE)], policy="prio", duration=one_second)
    lack = refusal.value.shortage
    assert (lack.cause, lack.node, lack.needed, lack.budget, lack.taken) == ("taken", "ram", 2 * PAGE, 3 * PAGE, 2 * PAGE)


def test_a_step_without_workers_is_refused(kit) -> None:  # type: ignore[no-untyped-def]
    """The number of tasks that did not run is named, with the latest events."""
    for plan in record(kit, 1, 3):
        with pytest.raises(SchedulerError, match=r"^3 tasks of the simulated step never ran\nlately:"):
            simulate(plan, workers=[], nodes=[("ram", MIB)], policy="prio", duration=one_second)


def test_the_real_runtime_runs_within_the_simulated_peak(kit) -> None:  # type: ignore[no-untyped-def]
    """One worker, prio: the real peak is the simulated one."""
    with Runtime(1, ram=MIB) as runtime:
        weight = kit.filled(runtime, 1, "weight", 512, kind="persistent")
        with runtime.record() as step:
            parts = [kit.handle(runtime, f"part {at}", 512) for at in range(5)]
            for part in parts:
                runtime.submit(kit.fill, [(part, "W")], {"value": 1.0})
            for part in parts:
                runtime.submit(kit.add, [(weight, "RW"), (part, "R")])
            del part, parts
        result = simulate(step.plan, workers=[("cpu", 0, 1)], nodes=[("ram", MIB)], policy="prio", duration=one_second)
        for _ in range(3):
            step.replay().wait()
        assert runtime.stats()["peak_bytes"] == result.peak_bytes == {"ram": 6 * PAGE}
        assert kit.value(runtime, weight) == 16


def test_what_stays_in_files_is_read_from_there(kit) -> None:  # type: ignore[no-untyped-def]
    """Over channels of its own link; what the step writes lies in memory like other data."""

    class Page:
        scratch_nbytes = 0

        def read(self, out: object, scratch: memoryview) -> None:
            raise AssertionError("virtual time reads nothing")

    runtime = CapturingRuntime()
    frozen, trained = ([kit.handle(runtime, f"{name} {at}", count=512, kind="persistent") for at in range(8)] for name in ("frozen", "trained"))
    for handle in [*frozen, *trained]:
        runtime.attach(handle, Page())
    with runtime.record():
        for a, b in zip(frozen, trained, strict=True):
            runtime.submit(kit.add, [(b, "RW"), (a, "R")])
    plan = runtime.plan
    assert plan.minimum_bytes(is_last=True, computes=True) == 9 * 4096
    found = simulate(
        plan,
        workers=[("cpu", 0, 1)],
        nodes=[("ram", 9 * 4096)],
        policy="eager",
        duration=one_second,
        transfer=lambda source, target, nbytes: 2.0,
        channels=4,
        prefetch=False,
    )
    assert found.moved_bytes == {"file->ram": 8 * 4096}
    assert found.seconds == 8 * 3.0


def test_bad_arguments_are_refused(kit) -> None:  # type: ignore[no-untyped-def]
    """An unknown policy or no replay at all."""
    for plan in record(kit, 1, 1):
        with pytest.raises(ValueError, match=r"one of eager, prio, lws.* got 'best', 2 and 1"):
            simulate(plan, workers=[("cpu", 0, 1)], nodes=[("ram", MIB)], policy="best", duration=one_second)


def there_and_back(kit, width: int, depth: int):  # type: ignore[no-untyped-def]
    """A step of `width` minibatches: `depth` tasks that leave a page each, then as many that read these pages, the last one first."""
    with Runtime(1, ram=MIB) as runtime:
        total = kit.filled(runtime, 0, "total", 512, kind="persistent", data_class="parameters")
        with runtime.record() as step:
            for _ in range(width):
                pages = []
                for _ in range(depth):
                    pages.append(kit.handle(runtime, "page", 512))
                    runtime.submit(kit.empty, [*((page, "R") for page in pages[-2:-1]), (pages[-1], "W")])
                back = kit.handle(runtime, "back", 512)
                runtime.submit(kit.empty, [(pages.pop(), "R"), (back, "W")])
                while pages:
                    runtime.submit(kit.empty, [(pages.pop(), "R"), (back, "RW")])
                runtime.submit(kit.add, [(total, "RW"), (back, "R")])
                del back
        return step.plan


def test_minibatches_pass_each_other_in_memory_that_holds_little_more_than_one(kit) -> None:  # type: ignore[no-untyped-def]
    """One makes its pages while the other gives its own back, so two workers are busy where memory holds not nearly what two minibatches want."""
    plan = there_and_back(kit, 6, 8)
    least = plan.minimum_bytes(is_last=True, computes=True) // PAGE
    assert least == 1 + 8 + 1

    def seconds(pages: int) -> float:
        return simulate(plan, workers=[("cpu", 0, 1)] * 2, nodes=[("ram", pages * PAGE)], policy="prio", duration=one_second, replays=1).seconds

    assert len(plan.tasks) == 102
    assert [seconds(least + extra) for extra in (0, 4, 8)] == [62.0, 56.0, 52.0]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_conditional_tasks_run_in_their_share_of_replays(share: float, kit) -> None:  # type: ignore[no-untyped-def]
    """Sixteen experts of a page on a disk and memory for four pages: a replay reads and runs about its share of them, in any number of replays."""
    runtime = CapturingRuntime()
    weights = [kit.handle(runtime, f"weight {expert}", 512, kind="persistent") for expert in range(16)]
    token = kit.handle(runtime, "token", 512, kind="persistent")
    with runtime.record():
        flags = runtime.handle(16, lambda memory, offset: None, name="flags")
        runtime.submit(kit.plus, [(token, "R"), (flags, "W")], condition=Condition(flags=1))
        for expert, weight in enumerate(weights):
            condition = Condition(guard=2, number=expert, share=share)
            runtime.submit(kit.plus, [(weight, "R"), (token, "RW"), (flags, "R")], condition=condition)
    for replays in (2, 3, 7):
        result = simulate(
            runtime.plan,
            workers=[("cpu", 0, 1)],
            nodes=[("ram", 4 * PAGE), ("disk", MIB)],
            storage=True,
            policy="eager",
            duration=one_second,
            replays=replays,
        )
        num_run = result.busy_seconds[0] - 1
        assert abs(num_run - 16 * share) <= 2
        assert result.moved_bytes["disk->ram"] <= (num_run + 2) * PAGE
