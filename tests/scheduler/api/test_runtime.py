"""The threaded runtime: values, failures, shutdown, back-pressure."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from support.deadline import DEADLINE
from support.resident import least_growth

from scheduler import Codelet, DoesNotFit, HandleLost, InlineRuntime, Runtime, SchedulerError, TaskError, Trace
from scheduler.core.errors import RuntimeBroken
from scheduler.core.events import TaskFinished
from scheduler.core.machine import Machine
from scheduler.core.shortage import Shortage
from scheduler.execution.backlog import WINDOW
from scheduler.testing import collect_inside

MIB = 1 << 20
MACHINES = [
    pytest.param({"cpu_workers": 1}, id="1 cpu"),
    pytest.param({"cpu_workers": 2, "sched": "eager"}, id="2 cpu eager"),
    pytest.param({"cpu_workers": 4, "sched": "lws"}, id="4 cpu lws"),
    pytest.param({"cpu_workers": 1, "sim_gpus": 1, "gpu_memory": 5 * 4096}, id="1 cpu 1 sim"),
    pytest.param({"cpu_workers": 0, "sim_gpus": 2, "gpu_memory": 5 * 4096, "sched": "lws"}, id="2 sim"),
]


def scramble(runtime, kit) -> list[float]:  # type: ignore[no-untyped-def]
    """A few hundred dependent tasks over twelve handles; the values they leave."""
    handles = [kit.filled(runtime, at, f"h{at}") for at in range(12)]
    for i in range(300):
        a, b, c = handles[i % 12], handles[(5 * i + 1) % 12], handles[(7 * i + 3) % 12]
        if len({a, b, c}) == 3:
            runtime.submit(kit.plus, [(a, "R"), (b, "R"), (c, "W")])
            runtime.submit(Codelet("shrink", cpu=lambda x: x.__imod__(1009)), [(c, "RW")])
    return [kit.value(runtime, handle) for handle in handles]


@pytest.mark.parametrize("machine", MACHINES)
def test_values_equal_inline_execution(machine: dict, kit) -> None:  # type: ignore[no-untyped-def]
    """Any workers, policy and devices (with eviction) give what running the tasks one by one gives."""
    expected = scramble(InlineRuntime(), kit)
    with Runtime(ram=MIB, **machine) as runtime:
        assert scramble(runtime, kit) == expected
        runtime._executor.validate()
        stats = runtime.stats()
    assert stats["tasks"] > 300
    assert all(stats["peak_bytes"][node] <= stats["budget_bytes"][node] for node in stats["peak_bytes"])


def test_kernel_exception_names_task_data_and_cause(kit) -> None:  # type: ignore[no-untyped-def]
    """The error names kernel, task and data and carries the traceback; dependants are cancelled, the rest runs, the runtime lives on."""
    with Runtime(2, ram=MIB) as runtime:
        good, bad, after = kit.filled(runtime, 1, "good"), kit.filled(runtime, 1, "bad tile"), kit.filled(runtime, 1, "after")
        runtime.submit(kit.fail, [(good, "R"), (bad, "RW")])
        runtime.submit(kit.add, [(after, "RW"), (bad, "R")])
        runtime.submit(kit.double, [(good, "RW")])
        with pytest.raises(TaskError, match=r"kernel 'fail' \(task \d+\) over R good, RW bad tile raised ZeroDivisionError: planted") as caught:
            runtime.wait()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.__cause__.__traceback__ is not None
        assert kit.value(runtime, good) == 2
        with pytest.raises(HandleLost, match=r"after.*cancelled.*bad tile"):
            kit.value(runtime, after)
        runtime.submit(kit.fill, [(bad, "W")], {"value": 5.0})
        runtime.submit(kit.fill, [(after, "W")], {"value": 1.0})
        runtime.submit(kit.add, [(after, "RW"), (bad, "R")])
        assert kit.value(runtime, after) == 6
        runtime.wait()


def test_a_task_larger_than_its_node_is_refused(kit) -> None:  # type: ignore[no-untyped-def]
    """The refusal names task, data, sizes and budget, at submission and while recording; smaller tasks still run."""
    with Runtime(1, ram=8 * 4096) as runtime:
        big, other, small = kit.handle(runtime, "big", 2048), kit.handle(runtime, "other", 2560), kit.handle(runtime, "small")
        with pytest.raises(
            DoesNotFit, match=r"plus needs 40,960 B at once \(R small 4,096 B, R big 16,384 B, W other 20,480 B\).*32,768 B"
        ) as refusal:
            runtime.submit(kit.plus, [(small, "R"), (big, "R"), (other, "W")])
        sizes = (("R", "small", 4096), ("R", "big", 16384), ("W", "other", 20480))
        assert refusal.value.shortage == Shortage("task", "ram", 40960, 32768, task="plus", sizes=sizes, workers=("cpu", "sim"))
        with pytest.raises(DoesNotFit), runtime.record():
            runtime.submit(kit.plus, [(small, "R"), (big, "R"), (other, "W")])
        runtime.submit(kit.fill, [(small, "W")], {"value": 3.0})
        assert kit.value(runtime, small) == 3


def test_data_that_does_not_fit_fails_instead_of_hanging(kit) -> None:  # type: ignore[no-untyped-def]
    """More live data than memory: the task that no longer fits fails with DoesNotFit, and so does the program's own acquisition."""
    with Runtime(2, ram=4 * 4096) as runtime:
        held = [kit.filled(runtime, 1, f"held {at}") for at in range(4)]
        one_more = kit.handle(runtime, "one more")
        assert runtime.refusal is None
        runtime.submit(kit.fill, [(one_more, "W")], {"value": 1.0})
        with pytest.raises(HandleLost, match=r"one more"):  # whoever needs its data hears of a loss
            kit.value(runtime, one_more)
        assert isinstance(runtime.refusal, DoesNotFit)
        with pytest.raises(DoesNotFit, match=r"fill needs 4,096 B at once on node ram.*W one more.*largest hole is 0 B") as told:
            runtime.wait()
        assert told.value is runtime.refusal
        assert told.value.shortage == Shortage("taken", "ram", 4096, 4 * 4096, 4 * 4096, "fill", (("W", "one more", 4096),))
        with pytest.raises(DoesNotFit, match=r"program needs"), runtime.acquire(one_more, "W"):
            pass
        del held[0]
        runtime.submit(kit.fill, [(one_more, "W")], {"value": 4.0})
        assert kit.value(runtime, one_more) == 4


def test_a_blocked_task_lets_others_free_memory(kit) -> None:  # type: ignore[no-untyped-def]
    """A task that does not fit yet holds no worker: ready tasks whose data then dies run first, and it does not fail."""
    gate, open_gate = kit.gate()
    with Runtime(1, ram=4 * 4096) as runtime:
        first = kit.handle(runtime, "first")
        dying = [kit.filled(runtime, at, f"dying {at}") for at in range(3)]
        sums = kit.filled(runtime, 0, "sums")
        runtime.submit(gate, [(sums, "RW")])
        pair = kit.handle(runtime, "pair", 1024)
        runtime.submit(kit.fill, [(pair, "W")], {"value": 1.0}, priority=9)
        for handle in dying:
            runtime.submit(kit.add, [(sums, "RW"), (handle, "R")])
        del handle, dying
        gc.collect()
        open_gate()
        runtime.wait()
        assert kit.value(runtime, sums) == 3
        assert kit.value(runtime, pair) == 1
        assert first is not None


def test_reading_what_nothing_wrote_is_an_error(kit) -> None:  # type: ignore[no-untyped-def]
    """Neither a task nor the program can read data that was never written; writing it makes it readable."""
    with Runtime(1, ram=MIB) as runtime:
        new, out = kit.handle(runtime, "new"), kit.filled(runtime, 0, "out")
        with pytest.raises(HandleLost, match=r"new.*nothing has written"):
            kit.value(runtime, new)
        runtime.submit(kit.add, [(out, "RW"), (new, "R")])
        with pytest.raises(TaskError, match=r"reads .*new.*nothing has written"):
            runtime.wait()
        with runtime.acquire(new, "W") as view:
            view.fill(2)
        assert kit.value(runtime, new) == 2


@pytest.mark.parametrize("make", [InlineRuntime, lambda: Runtime(1, ram=MIB)])
def test_the_same_handle_twice_is_refused(make, kit) -> None:  # type: ignore[no-untyped-def]
    """A handle may appear once per task; the error names the codelet and what to do."""
    runtime = make()
    try:
        data = kit.filled(runtime, 1, "twice")
        with pytest.raises(ValueError, match=r"add.*same handle twice.*RW twice, R twice.*once"):
            runtime.submit(kit.add, [(data, "RW"), (data, "R")])
        assert kit.value(runtime, data) == 1
    finally:
        getattr(runtime, "close", lambda: None)()


def test_scratch_is_private_to_each_task(kit) -> None:  # type: ignore[no-untyped-def]
    """One scratch handle used by many tasks at a time gives each its own memory, and nothing remains."""
    barrier = threading.Barrier(2, timeout=DEADLINE)

    def use(out, scratch, *, value) -> None:  # type: ignore[no-untyped-def]
        scratch.fill(value)
        barrier.wait()
        out[:] = scratch

    with Runtime(2, ram=MIB) as runtime:
        scratch = kit.handle(runtime, "scratch")
        outs = [kit.handle(runtime, f"out {at}") for at in range(6)]
        for at, out in enumerate(outs):
            runtime.submit(Codelet("use", cpu=use), [(out, "W"), (scratch, "SCRATCH")], {"value": at})
        assert [kit.value(runtime, out) for out in outs] == [0, 1, 2, 3, 4, 5]
        assert runtime.stats()["resident_bytes"]["ram"] == 6 * 4096


def test_back_pressure_keeps_a_hundred_thousand_tasks_within_the_window(kit) -> None:  # type: ignore[no-untyped-def]
    """Submitting never lets more than the window of tasks wait, even when the first of them takes its time."""
    gate, open_gate = kit.gate()
    most = 0
    with Runtime(1, ram=MIB) as runtime:
        handles = [kit.filled(runtime, 0) for _ in range(3)]
        runtime.submit(gate, [(handles[0], "RW")])
        for number in range(100_000):
            runtime.submit(kit.empty, [(handles[0], "R"), (handles[1 + number % 2], "RW")])
            if number == WINDOW - 10:
                open_gate()
            if number % 97 == 0:
                most = max(most, runtime._executor.machine.num_unfinished)
        runtime.wait()
    assert WINDOW // 2 < most <= WINDOW + 1


def test_the_program_may_hold_data_while_it_submits_past_the_window(kit) -> None:  # type: ignore[no-untyped-def]
    """Back-pressure never waits for tasks that wait for the program."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 0)
        with runtime.acquire(data, "W") as view:
            view.fill(1)
            for _ in range(WINDOW + 50):
                runtime.submit(kit.empty, [(data, "R")])


@pytest.mark.parametrize("machine", MACHINES)
def test_garbage_collection_inside_every_handler(machine: dict, kit, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Handles that die in a collection under the machine's own lock are released through the inbox, without deadlock."""
    start = Machine.__init__

    def collecting(self, *args, **options) -> None:  # type: ignore[no-untyped-def]
        start(self, *args, **options)
        collect_inside(self)

    monkeypatch.setattr(Machine, "__init__", collecting)
    with Runtime(ram=MIB, **machine) as runtime:
        total = kit.filled(runtime, 0, "total")
        for number in range(60):
            cycle: list = [kit.handle(runtime, f"cyclic {number}")]
            cycle.append(cycle)
            runtime.submit(kit.fill, [(cycle[0], "W")], {"value": 1.0})
            runtime.submit(kit.add, [(total, "RW"), (cycle[0], "R")])
            del cycle
        assert kit.value(runtime, total) == 60
        gc.collect()
        runtime.wait()
        kit.value(runtime, total)
        assert sum(runtime.stats()["resident_bytes"].values()) <= 2 * 4096


def test_an_exception_in_the_block_ends_the_runtime(kit) -> None:  # type: ignore[no-untyped-def]
    """The program's exception comes out as it is, queued tasks are abandoned, and the runtime refuses further work."""
    gate, open_gate = kit.gate()
    ran = []
    with pytest.raises(KeyError, match=r"program"), Runtime(1, ram=MIB) as runtime:  # noqa: PT012
        data = kit.filled(runtime, 0)
        runtime.submit(gate, [(data, "RW")])
        runtime.submit(Codelet("late", cpu=lambda view: ran.append(1)), [(data, "RW")])
        threading.Timer(0.05, open_gate).start()
        raise KeyError("program")
    assert not ran
    with pytest.raises(SchedulerError, match=r"closed"):
        runtime.submit(kit.double, [(data, "RW")])
    with pytest.raises(SchedulerError, match=r"closed"):
        runtime.wait()
    runtime.close()


def test_a_bug_in_the_machine_wakes_everybody(kit, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """When a worker fails inside the machine, waits end with the reason instead of hanging, and so does leaving the block."""
    gate, open_gate = kit.gate()
    with pytest.raises(RuntimeBroken, match=r"a planted bug"), Runtime(2, ram=MIB) as runtime:  # noqa: PT012
        data = kit.filled(runtime, 0)
        with runtime.record() as step:
            runtime.submit(gate, [(data, "RW")])
        ticket = step.replay()
        monkeypatch.setitem(runtime._executor.machine.handlers, TaskFinished, broken_handler)
        threading.Timer(0.05, open_gate).start()
        for wait in (ticket.wait, runtime.wait, lambda: kit.value(runtime, data), step.replay):
            with pytest.raises(RuntimeBroken, match=r"a planted bug"):
                wait()


def broken_handler(event: object, actions: object) -> None:
    """A handler with a bug."""
    raise LookupError("a planted bug")


def test_an_interrupted_acquisition_holds_nothing(kit, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Ctrl-C while the program waits for data: the data is given back when it comes, and later tasks run."""
    from scheduler.execution.waiting import Waiter

    gate, open_gate = kit.gate()
    with Runtime(1, ram=MIB) as runtime:
        read, written = kit.filled(runtime, 1, "read"), kit.filled(runtime, 1, "written")
        runtime.submit(gate, [(read, "RW"), (written, "RW")])

        def interrupted(self: Waiter) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Waiter, "wait", interrupted)
            for handle, mode in ((read, "R"), (written, "W")):
                with pytest.raises(KeyboardInterrupt), runtime.acquire(handle, mode):
                    pass
            with pytest.raises(KeyboardInterrupt):
                runtime.wait()
        assert not runtime._executor.waiters._waiters
        runtime.submit(kit.double, [(read, "RW")])
        open_gate()
        assert kit.value(runtime, read) == 2
        with pytest.raises(HandleLost, match=r"interrupted"):
            kit.value(runtime, written)
        runtime.wait()


def test_an_abandoned_runtime_can_be_collected(kit) -> None:  # type: ignore[no-untyped-def]
    """A closed runtime leaves no threads and no memory behind."""
    runtime = Runtime(2, sim_gpus=1, ram=MIB)
    kit.value(runtime, kit.filled(runtime, 1))
    runtime.close()
    arena = weakref.ref(runtime._executor.pool.arenas[0])
    del runtime
    gc.collect()
    assert arena() is None


def test_bad_machines_are_refused() -> None:
    """No worker, an unknown policy, budgets that are not positive: the message has the value and what is legal."""
    with pytest.raises(ValueError, match=r"at least one worker, got 0 CPU workers and 0"):
        Runtime(0)
    with pytest.raises(ValueError, match=r"'fastest'; there are auto, eager, prio, lws"):
        Runtime(1, sched="fastest")
    with pytest.raises(ValueError, match=r"ram must be a positive number of bytes, got 0"):
        Runtime(1, ram=0)
    with pytest.raises(ValueError, match=r"ram must be a positive number of bytes, got '1GB'; give a whole number"):
        Runtime(1, ram="1GB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lanes must be at least 1, got 0"):
        Runtime(1, lanes=0)


def test_a_codelet_without_a_worker_is_refused(kit) -> None:  # type: ignore[no-untyped-def]
    """A CUDA-only codelet on a CPU machine is refused by name when submitted."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 0)
        with pytest.raises(ValueError, match=r"Codelet\('gpu only'\) runs on cuda, and there are only cpu workers"):
            runtime.submit(Codelet("gpu only", cuda=lambda view: None), [(data, "RW")])


def test_sim_bandwidth_does_not_delay_the_end(kit) -> None:  # type: ignore[no-untyped-def]
    """Closing does not wait for the simulated time of copies under way."""
    with pytest.raises(KeyError), Runtime(0, sim_gpus=1, ram=MIB, sim_bandwidth=1.0) as runtime:  # noqa: PT012
        data = kit.filled(runtime, 1)
        runtime.submit(kit.double, [(data, "RW")])
        raise KeyError


def test_ten_thousand_temporaries_keep_memory_flat(kit) -> None:  # type: ignore[no-untyped-def]
    """Plain tasks over short-lived handles leave neither records nor resident memory behind."""
    with Runtime(1, ram=4 * MIB) as runtime:
        total = kit.filled(runtime, 0, "total")

        def go(count: int) -> None:
            for _ in range(count):
                part = kit.handle(runtime)
                runtime.submit(kit.fill, [(part, "W")], {"value": 1.0})
                runtime.submit(kit.add, [(total, "RW"), (part, "R")])
                del part
            runtime.wait()

        go(10_000)  # as many as below, so that as many are pending at once
        assert least_growth(lambda: go(10_000)) < 2 * MIB
        assert kit.value(runtime, total) == 40_000
        assert runtime.stats()["resident_bytes"]["ram"] == 4096


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace_is_valid_chrome_json(name: str, kit, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """One track per worker and link, complete events with durations, counters for bytes and ready tasks."""
    import gzip
    import json

    trace = Trace()
    with Runtime(1, sim_gpus=1, ram=MIB, sched="eager", trace=trace) as runtime:
        scramble(runtime, kit)
        path = tmp_path / name
        trace.write(path, runtime.worker_names, runtime.node_names)
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
    events = document["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"workers", "links", "cpu:0", "sim:0", "ram->sim:0"} <= names
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and isinstance(event["ts"], float) for event in spans)
    assert sum(event["name"] == "plus" for event in spans) > 100
    starts, ends = ([event["id"] for event in events if event["ph"] == phase] for phase in "sf")
    assert starts
    assert starts == ends
    assert {event["name"] for event in events if event["ph"] == "C"} == {"bytes ram", "bytes sim:0", "ready tasks"}


def test_an_inactive_trace_stays_empty(kit, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """`active` switches collection on and off while the program runs."""
    trace = Trace(active=False)
    with Runtime(1, ram=MIB, trace=trace) as runtime:
        scramble(runtime, kit)
        assert not list(trace.tasks())
        trace.active = True
        kit.value(runtime, kit.filled(runtime, 1))
        data = kit.filled(runtime, 1)
        runtime.submit(kit.double, [(data, "RW")])
        runtime.wait()
    assert [name for _, name, *_ in trace.tasks()] == ["double"]
