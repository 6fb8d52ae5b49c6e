"""Programs that a runtime refuses: the kind of the error, and its sentence with the values and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler import (
    CapturingRuntime,
    Codelet,
    Condition,
    DoesNotFit,
    InlineRuntime,
    PlacementError,
    RecordingError,
    Runtime,
    SchedulerError,
    TaskError,
)
from scheduler.planning import PlannedOrder
from scheduler.storage.arena import HostArena
from scheduler.testing import FakeGpu

MIB = 1 << 20


def on_a_gpu_inline(kit: Any) -> None:
    """A codelet for GPUs, on the runtime without workers."""
    InlineRuntime().submit(Codelet("on GPUs", cuda=lambda out: None), [])


def replay_inside(kit: Any) -> None:
    """A replay of a step before its recording has ended."""
    with Runtime(1, ram=MIB) as runtime, runtime.record() as step:
        step.replay()


def read_inside(kit: Any) -> None:
    """A read of the program's data during a recording."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, "data")
        with runtime.record(), runtime.acquire(data, "R"):
            pass


def a_conditional_exchange(kit: Any) -> None:
    """An operation of the host that depends on a flag."""
    with Runtime(1, ram=MIB) as runtime:
        flags = kit.filled(runtime, 1, "flags")
        exchange = Codelet("exchange", host=lambda done, *views: done(None))
        runtime.submit(exchange, [(flags, "R")], condition=Condition(guard=0))


def gpus_without_a_budget(kit: Any) -> None:
    """A GPU whose memory has no limit."""
    Runtime(1, ram=MIB, gpus=[FakeGpu()])


def two_kinds_of_devices(kit: Any) -> None:
    """GPUs next to simulated devices."""
    Runtime(1, ram=MIB, sim_gpus=2, gpus=[FakeGpu()], gpu_memory=MIB)


def an_unknown_eviction_policy(kit: Any) -> None:
    """A name that no policy has."""
    Runtime(1, ram=MIB, evict="random")


def a_worker_that_is_missing(kit: Any) -> None:
    """A step that was captured for two devices, on a runtime with one."""
    captured = CapturingRuntime(workers=("cpu:0", "sim:0", "sim:1"))
    with captured.record(), captured.place("sim:1"):
        captured.submit(kit.empty, [(kit.handle(captured), "W")])
    planned = PlannedOrder("submission", captured.plan, {})
    with Runtime(1, ram=MIB, sim_gpus=1, gpu_memory=MIB) as runtime:
        runtime.adopt(planned, {}, {})


def _record(kit: Any, **options: str) -> None:
    with Runtime(1, ram=MIB) as runtime, runtime.record(**options):
        runtime.submit(kit.empty, [(kit.handle(runtime), "W")])


def an_unknown_order(kit: Any) -> None:
    """A name that no order of the step has."""
    _record(kit, order="backwards")


def an_unknown_recomputation(kit: Any) -> None:
    """An operation that the step does not have."""
    _record(kit, recompute="gelu")


def a_source_after_the_end(kit: Any) -> None:
    """A file for data of a runtime that is closed."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.handle(runtime, "data")
    runtime.attach(data, Zeros())


class Zeros:
    """A source of zeros."""

    scratch_nbytes = 0

    def read(self, out: Any, scratch: memoryview) -> None:
        """Fill the view."""
        out.fill(0)


class Torn(Zeros):
    """A source that cannot be read."""

    def read(self, out: Any, scratch: memoryview) -> None:
        """Raise an error."""
        raise OSError("planted")


class Large(Zeros):
    """A source whose readers need more memory than there is."""

    scratch_nbytes = MIB


def a_budget_without_addresses(kit: Any) -> None:
    """More bytes than addresses."""
    HostArena(1 << 62)


REFUSED: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (on_a_gpu_inline, ValueError, r"^Codelet\('on GPUs'\) has no CPU implementation; register one or use a runtime with its device$"),
    (replay_inside, RecordingError, r"^the step is still being recorded \(or recording failed\); leave the `with runtime.record\(\)` block first$"),
    (read_inside, RecordingError, r"^.*'data'.* cannot be acquired while a step is being recorded; read values through the ticket of a replay$"),
    (
        a_conditional_exchange,
        ValueError,
        r"^Codelet\('exchange'\) depends on a flag, so it must run on a worker, got a host operation; submit it without",
    ),
    (gpus_without_a_budget, ValueError, r"^GPUs need a budget; give gpu_memory, the bytes of each$"),
    (two_kinds_of_devices, ValueError, r"^devices must be real or simulated, got 1 and 2; leave one kind out$"),
    (an_unknown_eviction_policy, ValueError, r"^unknown eviction policy 'random'; there are next-use, lru, fifo$"),
    (a_worker_that_is_missing, PlacementError, r"^place\(\) takes the name of a worker of this runtime, got 'worker 2'; name one of cpu:0, sim:0$"),
    (an_unknown_order, RecordingError, r"^this step has no order 'backwards'; it has submission, .*, and auto$"),
    (
        an_unknown_recomputation,
        RecordingError,
        r"^this step has no results of 'gelu' to recompute; none of its results can be recomputed, so use 'none'$",
    ),
    (a_source_after_the_end, SchedulerError, r"^the runtime is closed$"),
    (a_budget_without_addresses, MemoryError, r"^the system refused to reserve 4,611,686,018,427,387,904 bytes .*; lower the memory budget$"),
]


@pytest.mark.parametrize(("program", "kind", "words"), REFUSED, ids=[program.__name__ for program, _, _ in REFUSED])
def test_a_program_is_refused_in_a_sentence(program: Callable[[Any], None], kind: type[Exception], words: str, kit: Any) -> None:
    """The runtime can be closed afterwards."""
    with pytest.raises(kind, match=words):
        program(kit)


FAILED = [
    {"cause": "raised", "why": "ZeroDivisionError: planted"},
    {"cause": "unwritten", "why": ""},
    {"cause": "lost", "why": "task 0 fail(W data) failed: planted"},
    {"cause": "unread", "why": "planted"},
]


@pytest.mark.parametrize("facts", FAILED, ids=[facts["cause"] for facts in FAILED])
def test_each_cause_of_a_failed_task_is_produced(facts: dict[str, str], kit: Any) -> None:
    """A kernel that raises; a task that reads data which nothing has written, whose writer has failed, or whose file cannot be read."""
    cause = facts["cause"]
    with Runtime(1, ram=MIB) as runtime:
        data, result = kit.handle(runtime, "data"), kit.handle(runtime, "result")
        if cause in ("raised", "lost"):
            runtime.submit(kit.fail, [(data, "W")])
        if cause == "unread":
            runtime.attach(data, Torn())
        if cause == "lost":
            with pytest.raises(TaskError):
                runtime.wait()
        if cause != "raised":
            runtime.submit(kit.plus, [(data, "R"), (result, "W")])
        with pytest.raises(TaskError) as failure:
            runtime.wait()
    error = failure.value
    assert error.cause == cause
    assert ("fail" if cause == "raised" else "plus") in error.task
    assert ("'data'" in error.data) == (cause != "raised")
    assert facts["why"] in error.why
    assert bool(error.why) == bool(facts["why"])


def test_readers_that_take_too_much_are_refused(kit: Any) -> None:
    """Before the data is attached; four of them read at a time."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.handle(runtime, "data")
        with pytest.raises(DoesNotFit) as refusal:
            runtime.attach(data, Large())
        lack = refusal.value.shortage
        assert (lack.cause, lack.node, lack.needed, lack.budget, lack.taken) == ("readers", "ram", 4 * MIB, MIB, 0)
        assert kit.value(runtime, kit.filled(runtime, 3, "other")) == 3
