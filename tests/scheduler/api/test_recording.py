"""Recorded steps: inputs, outputs, two replays in flight, tickets, lifetimes."""

from __future__ import annotations

import contextlib
import gc
import itertools

import numpy as np
import pytest
from support.resident import least_growth

from scheduler import Codelet, DoesNotFit, HandleLost, RecordingError, Runtime, Step, TaskError
from scheduler.machine import StepPlan

MIB = 1 << 20
MACHINES = [
    pytest.param({"cpu_workers": 2}, id="2 cpu"),
    pytest.param({"cpu_workers": 1, "sim_gpus": 2, "gpu_memory": 4 * 4096, "sched": "lws"}, id="1 cpu 2 sim"),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_replays_use_inputs_of_their_time_and_keep_their_outputs(machine: dict, kit) -> None:  # type: ignore[no-untyped-def]
    """Inputs may be overwritten as soon as replay() returns; every ticket reads its own output; persistent data accumulates in order."""
    with Runtime(ram=MIB, **machine) as runtime:
        weight = kit.filled(runtime, 0, "weight", kind="persistent")
        data = kit.filled(runtime, 0, "data", kind="input")
        with runtime.record() as step:
            part, loss = kit.handle(runtime, "part"), kit.handle(runtime, "loss")
            runtime.submit(kit.plus, [(data, "R"), (data2 := weight, "R"), (part, "W")])
            runtime.submit(kit.add, [(data2, "RW"), (data, "R")])
            runtime.submit(kit.plus, [(part, "R"), (weight, "R"), (loss, "W")])
            del part, data2
        assert step.num_tasks == 4
        previous, losses = None, []
        for number in range(1, 20):
            with runtime.acquire(data, "W") as view:
                view.fill(number)
            ticket = step.replay()
            if previous is not None:
                losses.append(previous.read(loss)[0])
            previous = ticket
        losses.append(previous.read(loss)[0])
        sums = [number * (number + 1) / 2 for number in range(20)]
        assert losses == [number + sums[number - 1] + sums[number] for number in range(1, 20)]
        assert previous.read(weight)[0] == kit.value(runtime, weight) == sums[19]
        runtime._executor.validate()


def test_plain_tasks_mix_with_replays(kit) -> None:  # type: ignore[no-untyped-def]
    """Tasks submitted between replays come after the one and before the next."""
    with Runtime(2, ram=MIB) as runtime:
        weight = kit.filled(runtime, 1, "weight", kind="persistent")
        with runtime.record() as step:
            runtime.submit(kit.double, [(weight, "RW")])
        one = kit.filled(runtime, 1, "one")
        expected = 1.0
        for _ in range(20):
            step.replay()
            runtime.submit(kit.add, [(weight, "RW"), (one, "R")])
            expected = 2 * expected + 1
        assert kit.value(runtime, weight) == expected


def test_two_replays_are_in_flight_and_no_more(kit) -> None:  # type: ignore[no-untyped-def]
    """replay() returns at once twice; the third waits for the first. A replay waits for data, not for the whole of the previous one."""
    gate, open_gate = kit.gate()
    with Runtime(2, ram=MIB) as runtime:
        slow, quick = kit.filled(runtime, 0, kind="persistent"), kit.filled(runtime, 1, kind="persistent")
        with runtime.record() as step:
            runtime.submit(kit.double, [(quick, "RW")])
            runtime.submit(gate, [(slow, "RW")])
        first, second = step.replay(), step.replay()
        assert kit.value(runtime, quick) == 4
        assert not first.done._event.is_set()
        open_gate()
        step.replay().wait()
        assert (first.number, second.number) == (0, 1)
        assert kit.value(runtime, quick) == 8


def test_reading_inside_a_recording_is_refused(kit) -> None:  # type: ignore[no-untyped-def]
    """A recording has no values: acquiring raises at once and says how to read; recordings do not nest; the runtime stays usable."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, "data")
        with runtime.record() as step:
            with pytest.raises(RecordingError, match=r"data.*through the ticket"):
                runtime.acquire(data, "R")
            with pytest.raises(RecordingError, match=r"must not nest"), runtime.record():
                pass
            with pytest.raises(RecordingError, match=r"leave the"):
                step.replay()
            assert runtime.recording
        assert not runtime.recording
        assert kit.value(runtime, data) == 1


def test_what_cannot_be_recorded_is_refused_by_name(kit) -> None:  # type: ignore[no-untyped-def]
    """Reading a handle of the step before writing it, and writing an input."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, "data", kind="input")
        with pytest.raises(RecordingError, match=r"add reads .*fresh.*no earlier task"), runtime.record():  # noqa: PT012
            fresh = kit.handle(runtime, "fresh")
            runtime.submit(kit.add, [(fresh, "RW"), (data, "R")])
        with pytest.raises(RecordingError, match=r"read an input, and .*mode RW"), runtime.record():
            runtime.submit(kit.double, [(data, "RW")])


def test_a_check_of_the_captured_step_may_refuse_it(kit) -> None:  # type: ignore[no-untyped-def]
    """The check gets all tasks before the step is planned, and before tasks are compared with workers and memories; its error ends the recording."""
    on_gpus = Codelet("on GPUs", cuda=lambda out: None)
    with Runtime(1, ram=MIB) as runtime:
        checked: list[list[str]] = []

        def check(plan: StepPlan) -> None:
            checked.append([task.name for task in plan.tasks])
            if len(plan.tasks) > 2:
                raise ValueError("too many tasks")

        def record(*accesses: tuple[Codelet, int]) -> Step:
            with runtime.record(check=check) as step:
                for codelet, nbytes in accesses:
                    runtime.submit(codelet, [(kit.handle(runtime, count=nbytes // 8), "W")])
            return step

        with pytest.raises(ValueError, match="too many tasks"):
            record((kit.empty, 8), (kit.empty, 2 * MIB), (on_gpus, 8))
        with pytest.raises(DoesNotFit) as error:
            record((kit.empty, 8), (kit.empty, 2 * MIB))
        assert (error.value.shortage.cause, error.value.shortage.budget) == ("task", MIB)
        with pytest.raises(ValueError, match="runs on cuda, and there are only cpu workers"):
            record((on_gpus, 8))
        record((kit.empty, 8)).replay().wait()
        assert checked == [["empty", "empty", "on GPUs"], ["empty", "empty"], ["on GPUs"], ["empty"]]


def test_tickets_expire_and_temporaries_cannot_be_read(kit) -> None:  # type: ignore[no-untyped-def]
    """An output is readable until its instance runs again; what nothing referenced at the end of the recording never is."""
    with Runtime(1, ram=MIB) as runtime:
        seed = kit.filled(runtime, 3, "seed", kind="persistent")
        with runtime.record() as step:
            out = kit.handle(runtime, "out")
            runtime.submit(kit.fill, [(out, "W")], {"value": 1.0})
            runtime.submit(kit.add, [(out, "RW"), (seed, "R")])
        tickets = [step.replay() for _ in range(3)]
        with pytest.raises(RecordingError, match=r"out.*of replay 0 was overwritten by replay 2; read it earlier"):
            tickets[0].read(out)
        assert tickets[1].read(out)[0] == tickets[2].read(out)[0] == 4
        with runtime.record() as other:
            temporary = kit.handle(runtime, "temporary")
            runtime.submit(kit.fill, [(temporary, "W")], {"value": 1.0})
            record = temporary.record
            del temporary
        ghost = kit.handle(runtime, "ghost")
        ghost.record = record
        with pytest.raises(RecordingError, match=r"ghost.*is not an output"):
            other.replay().read(ghost)
        ghost.inbox = None


def test_temporaries_die_inside_the_replay(kit) -> None:  # type: ignore[no-untyped-def]
    """Between replays only persistent data and outputs of two instances hold memory, and dropping step and tickets frees the outputs."""
    with Runtime(2, ram=64 * 4096) as runtime:
        weight = kit.filled(runtime, 1, "weight", kind="persistent")
        with runtime.record() as step:
            chain = [kit.handle(runtime, f"chain {at}") for at in range(20)]
            runtime.submit(kit.plus, [(weight, "R"), (extra := kit.handle(runtime), "W"), (chain[0], "W")])
            for before, after in itertools.pairwise(chain):
                runtime.submit(kit.plus, [(before, "R"), (weight, "R"), (after, "W")])
            out = chain[-1]
            del chain, extra, before, after
        ticket = None
        for _ in range(6):
            ticket = step.replay()
        assert ticket is not None
        ticket.wait()
        runtime.wait()
        assert runtime.stats()["resident_bytes"]["ram"] == 3 * 4096
        assert runtime.stats()["peak_bytes"]["ram"] <= 12 * 4096
        del step
        assert ticket.read(out).shape == (8,)
        del ticket
        kit.value(runtime, weight)
        assert runtime.stats()["resident_bytes"]["ram"] == 4096


def test_a_step_forgotten_in_flight_still_ends(kit) -> None:  # type: ignore[no-untyped-def]
    """Dropping step and ticket while tasks run neither frees what they use nor leaves anything behind, without a collection."""
    gate, open_gate = kit.gate()
    gc.disable()
    try:
        with Runtime(2, ram=MIB) as runtime:
            weight = kit.filled(runtime, 1, "weight", kind="persistent")
            with runtime.record() as step:
                out = kit.handle(runtime, "out")
                runtime.submit(gate, [(weight, "RW")])
                runtime.submit(kit.plus, [(weight, "R"), (weight2 := kit.handle(runtime), "W"), (out, "W")])
                runtime.submit(kit.double, [(weight, "RW")])
                del weight2
            step.replay()
            step.replay()
            del step, out
            open_gate()
            assert kit.value(runtime, weight) == 4
            runtime.wait()
            kit.value(runtime, weight)
            assert runtime.stats()["resident_bytes"]["ram"] == 4096
    finally:
        gc.enable()


def test_the_step_keeps_alive_what_it_uses(kit) -> None:  # type: ignore[no-untyped-def]
    """Data made before the recording may be forgotten by the program; replays still find it."""
    with Runtime(1, ram=MIB) as runtime:
        constant, weight = kit.filled(runtime, 5, "constant"), kit.filled(runtime, 0, "weight")
        with runtime.record() as step:
            runtime.submit(kit.add, [(weight, "RW"), (constant, "R")])
        del constant
        for _ in range(3):
            step.replay().wait()
        assert kit.value(runtime, weight) == 15


def _exploding() -> tuple[list[int], Codelet]:
    """A codelet that adds one, or raises while the list with it holds anything."""
    explode: list[int] = []

    def perhaps(view) -> None:  # type: ignore[no-untyped-def]
        if explode:
            raise ZeroDivisionError("planted")
        view += 1

    return explode, Codelet("perhaps", cpu=perhaps)


def test_failure_of_a_replay_is_its_tickets(kit) -> None:  # type: ignore[no-untyped-def]
    """The ticket raises with the kernel's cause, also the next replay's that reads the lost data; replay() then refuses until it is restored."""
    explode, perhaps = _exploding()

    with Runtime(2, ram=MIB) as runtime:
        weight = kit.filled(runtime, 0, "weight", kind="persistent")
        with runtime.record() as step:
            out = kit.handle(runtime, "out")
            runtime.submit(perhaps, [(weight, "RW")])
            runtime.submit(kit.plus, [(weight, "R"), (other := kit.handle(runtime), "W"), (out, "W")])
            del other
        step.replay().wait()
        explode.append(1)
        bad, cancelled = step.replay(), None
        with contextlib.suppress(TaskError):  # the failure may be quicker than the program
            cancelled = step.replay()
        with pytest.raises(TaskError, match=r"'perhaps'.*RW weight raised ZeroDivisionError") as caught:
            bad.wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(HandleLost, match=r"out"):
            bad.read(out)
        if cancelled is not None:
            with pytest.raises(TaskError, match=r"cancelled: it reads .*weight"):
                cancelled.wait()
        with pytest.raises(HandleLost, match=r"weight.*restore or overwrite"):
            step.replay()
        runtime.wait()
        with runtime.acquire(weight, "W") as view:
            view.fill(0)
        step.replay().wait_done()
        with pytest.raises(TaskError, match=r"'perhaps'.*raised ZeroDivisionError"):
            step.replay()
        with pytest.raises(HandleLost, match=r"weight.*restore or overwrite"):
            step.replay()
        explode.clear()
        with runtime.acquire(weight, "W") as view:
            view.fill(10)
        step.replay().wait()
        assert kit.value(runtime, weight) == 11


def test_a_replay_that_fails_before_its_updates_has_changed_nothing(kit) -> None:  # type: ignore[no-untyped-def]
    """What it was to update is as it was; what it had changed already, and was to change again, is lost."""
    explode, perhaps = _exploding()
    with Runtime(2, ram=MIB) as runtime:
        weight, count, twice = (kit.filled(runtime, 1, name, kind="persistent") for name in ("weight", "count", "twice"))
        with runtime.record() as step:
            gradient = kit.handle(runtime, "gradient")
            runtime.submit(kit.double, [(twice, "RW")])
            runtime.submit(kit.fill, [(gradient, "W")], {"value": 2.0})
            runtime.submit(perhaps, [(gradient, "RW")])
            runtime.submit(kit.add, [(weight, "RW"), (gradient, "R")])
            runtime.submit(kit.add, [(count, "RW"), (weight, "R")])
            runtime.submit(kit.add, [(twice, "RW"), (gradient, "R")])
            del gradient
        step.replay().wait()
        assert [kit.value(runtime, handle) for handle in (weight, count, twice)] == [4, 5, 5]
        explode.append(1)
        bad = step.replay()
        with pytest.raises(TaskError, match=r"'perhaps'.*RW gradient raised ZeroDivisionError"):
            bad.wait()
        assert not bad.changed_nothing  # but `twice`
        assert [kit.value(runtime, handle) for handle in (weight, count)] == [4, 5]
        with pytest.raises(HandleLost, match=r"'twice'.*planted"):
            kit.value(runtime, twice)
        with runtime.acquire(twice, "W") as view:
            view.fill(5)
        explode.clear()
        step.replay().wait()
        assert [kit.value(runtime, handle) for handle in (weight, count, twice)] == [7, 12, 13]
        runtime._executor.validate()


def test_a_replay_behind_a_failed_one_runs_as_if_that_had_not_been(kit) -> None:  # type: ignore[no-untyped-def]
    """Though it was in flight when the first one failed."""
    explode = [1]

    def once(gradient, weight) -> None:  # type: ignore[no-untyped-def]
        if explode:
            explode.clear()
            raise ZeroDivisionError("planted")
        gradient += weight

    with Runtime(2, ram=MIB) as runtime:
        weight, held = (kit.filled(runtime, 1, name, kind="persistent") for name in ("weight", "held"))
        with runtime.record() as step:
            gradient = kit.handle(runtime, "gradient")
            runtime.submit(kit.fill, [(gradient, "W")], {"value": 2.0})
            runtime.submit(Codelet("once", cpu=once), [(gradient, "RW"), (weight, "R")])
            runtime.submit(kit.add, [(weight, "RW"), (gradient, "R")])
            runtime.submit(kit.double, [(held, "RW")])
            del gradient
        with runtime.acquire(held, "R"):  # neither replay can end
            bad, good = step.replay(), step.replay()
        with pytest.raises(TaskError, match=r"'once'.*ZeroDivisionError"):
            bad.wait()
        good.wait()
        assert not bad.changed_nothing  # `held` is doubled
        assert not good.changed_nothing  # it has not failed
        assert [kit.value(runtime, handle) for handle in (weight, held)] == [4, 4]


def test_a_replay_in_flight_that_has_lost_data_tells_why(kit) -> None:  # type: ignore[no-untyped-def]
    """At once, though another task of it has to wait for what the program holds; once, and its ticket all the same."""
    explode, perhaps = _exploding()

    with Runtime(1, ram=MIB) as runtime:
        weight, other = (kit.filled(runtime, 0, name, kind="persistent") for name in ("weight", "other"))
        with runtime.record() as step:
            runtime.submit(perhaps, [(weight, "RW")])
            runtime.submit(kit.double, [(other, "RW")])
        step.replay().wait()
        explode.append(1)
        with runtime.acquire(other, "R"):
            ticket = step.replay()
            with pytest.raises((HandleLost, TaskError)):
                kit.value(runtime, weight)
            with pytest.raises(TaskError, match=r"'perhaps'.*raised ZeroDivisionError"):
                step.replay()
            with pytest.raises(HandleLost, match="restore or overwrite it first"):
                step.replay()
        with pytest.raises(TaskError, match=r"'perhaps'.*raised ZeroDivisionError"):
            ticket.wait()
        with pytest.raises(HandleLost, match="restore or overwrite it first"):
            step.replay()


def test_an_exception_while_recording_leaves_the_runtime_usable(kit) -> None:  # type: ignore[no-untyped-def]
    """The exception comes out, the recording is over, the half-made step refuses to run."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, "data")
        with pytest.raises(KeyError), runtime.record() as step:  # noqa: PT012
            runtime.submit(kit.double, [(data, "RW")])
            raise KeyError
        with pytest.raises(RecordingError, match=r"recording failed"):
            step.replay()
        runtime.submit(kit.double, [(data, "RW")])
        assert kit.value(runtime, data) == 2


def test_an_empty_step_replays(kit) -> None:  # type: ignore[no-untyped-def]
    """A recording without tasks is legal and ends at once."""
    with Runtime(1, ram=MIB) as runtime:
        with runtime.record() as step:
            pass
        for _ in range(5):
            step.replay().wait()


@pytest.mark.long
def test_ten_thousand_small_replays_keep_memory_flat(kit) -> None:  # type: ignore[no-untyped-def]
    """Resident memory does not grow with the number of replays, with inputs written and outputs read each time."""
    with Runtime(1, ram=4 * MIB) as runtime:
        weight, data = kit.filled(runtime, 0, kind="persistent"), kit.filled(runtime, 0, kind="input")
        with runtime.record() as step:
            out = kit.handle(runtime, "out")
            runtime.submit(kit.plus, [(data, "R"), (weight, "R"), (out, "W")])
            runtime.submit(kit.add, [(weight, "RW"), (data, "R")])

        def go(count: int) -> None:
            previous = None
            for _ in range(count):
                with runtime.acquire(data, "W") as view:
                    view.fill(1)
                ticket = step.replay()
                if previous is not None:
                    previous.read(out)
                previous = ticket

        go(2_000)
        assert least_growth(lambda: go(5_000)) < MIB
        assert kit.value(runtime, weight) == 17_000
        assert not runtime._executor.endings
        assert not runtime._executor.waiters._waiters


def test_ten_thousand_steps_of_changing_length_keep_memory_flat(kit) -> None:  # type: ignore[no-untyped-def]
    """Every hundred steps another length is recorded, over the same weight in the same memory; what belonged to the old length goes."""
    take_first = Codelet("take first", cpu=lambda weight, total: np.add(weight, total[: weight.size], out=weight))
    with Runtime(1, ram=64 * 4096) as runtime:
        weight = kit.filled(runtime, 0, kind="persistent")

        def go(length: int, count: int) -> None:
            pages = [kit.filled(runtime, 1, "data", 512, kind="input") for _ in range(length)]
            with runtime.record() as step:
                total = kit.handle(runtime, "total", 512)
                runtime.submit(kit.fill, [(total, "W")], {"value": 0.0})
                for page in pages:
                    runtime.submit(kit.add, [(total, "RW"), (page, "R")])
                runtime.submit(take_first, [(weight, "RW"), (total, "R")])
            ticket = None
            for _ in range(count):
                ticket = step.replay()
            assert ticket is not None
            assert ticket.read(total)[0] == length

        lengths = [1 + at * 7 % 13 for at in range(100)]
        for length in lengths[:13]:
            go(length, 100)
        assert least_growth(lambda: [go(length, 50) for length in lengths]) < MIB
        assert kit.value(runtime, weight) == 150 * sum(lengths) + 100 * sum(lengths[:13])
        kit.value(runtime, weight)
        assert runtime.stats()["resident_bytes"]["ram"] <= 2 * 4096


def test_fragmentation_alone_never_fails_a_task(kit) -> None:  # type: ignore[no-untyped-def]
    """Enough free bytes in holes too small: the node is compacted, data and views follow, the task runs."""
    with Runtime(2, ram=10 * 4096) as runtime:
        small = [kit.filled(runtime, at, f"small {at}") for at in range(10)]
        del small[::2]
        large = kit.handle(runtime, "large", 5 * 512)
        runtime.submit(kit.fill, [(large, "W")], {"value": 7.0})
        runtime.wait()
        assert [kit.value(runtime, handle) for handle in small] == [1, 3, 5, 7, 9]
        assert kit.value(runtime, large) == 7
        runtime._executor.validate()
