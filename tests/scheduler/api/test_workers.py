"""Worker threads: where they run, what they hold while they do, and what they cost while they do not."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Iterator

import pytest

from scheduler import Codelet, Runtime, usable_cores

MIB = 1 << 20
SECONDS = 60.0
"""After so long a test has failed."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads keep to cores, and are counted one by one, on Linux only")


@pytest.fixture
def one_core() -> Iterator[None]:
    """This process may use one core only."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(usable)})
    yield
    os.sched_setaffinity(0, usable)


def places(kit, runtime: Runtime, num_workers: int) -> list[set[int]]:  # type: ignore[no-untyped-def]
    """The cores that each worker may use."""
    found: list[set[int]] = []
    together = threading.Barrier(num_workers)

    def look(number: object) -> None:
        together.wait(SECONDS)  # so every worker has one of the tasks
        found.append(os.sched_getaffinity(0))

    for _ in range(num_workers):
        runtime.submit(Codelet("look", cpu=look), [(kit.filled(runtime, 0), "RW")])
    runtime.wait()
    return found


@linux
def test_as_many_workers_as_cores_keep_to_one_each(kit) -> None:  # type: ignore[no-untyped-def]
    """Each has a core of its own; the program's thread may still go anywhere."""
    usable = os.sched_getaffinity(0)
    with Runtime(usable_cores(), ram=MIB) as runtime:
        assert sorted(map(sorted, places(kit, runtime, usable_cores()))) == [[core] for core in sorted(usable)]
    assert os.sched_getaffinity(0) == usable


@linux
@pytest.mark.usefixtures("one_core")
def test_the_mask_of_the_process_is_honoured(kit) -> None:  # type: ignore[no-untyped-def]
    """A process confined to a core has its one worker there, and two workers go wherever they may."""
    usable = os.sched_getaffinity(0)
    for num_workers in (1, 2):
        with Runtime(num_workers, ram=MIB) as runtime:
            assert places(kit, runtime, num_workers) == [usable] * num_workers


@linux
@pytest.mark.parametrize("extra", [-1, 1])
def test_fewer_or_more_workers_than_cores_go_anywhere(kit, extra: int) -> None:  # type: ignore[no-untyped-def]
    """Fewer might choose cores that another program has chosen too; more would have to share."""
    num_workers = usable_cores() + extra
    if not num_workers:
        pytest.skip("there is one core only")
    with Runtime(num_workers, ram=MIB) as runtime:
        assert places(kit, runtime, num_workers) == [os.sched_getaffinity(0)] * num_workers


def test_no_lock_is_held_during_a_kernel(kit) -> None:  # type: ignore[no-untyped-def]
    """While a kernel waits, the program can do everything that takes the runtime's lock."""
    begun, served = threading.Event(), threading.Event()
    waited: list[bool] = []

    def wait(number: object) -> None:
        begun.set()
        waited.append(served.wait(SECONDS))

    with Runtime(1, ram=MIB) as runtime:
        held, other = kit.filled(runtime, 0), kit.filled(runtime, 2)
        runtime.submit(Codelet("wait", cpu=wait), [(held, "RW")])
        assert begun.wait(SECONDS)
        runtime.submit(kit.double, [(held, "RW")])
        assert runtime.stats()["tasks"] == 0
        assert kit.value(runtime, other) == 2
        served.set()
    assert waited == [True]


@linux
def test_a_worker_leaves_with_its_next_task_in_hand(kit) -> None:  # type: ignore[no-untyped-def]
    """A worker alone runs a chain of replayed tasks without once waiting for another thread to hand it one."""
    switches: list[int] = []
    count = Codelet("count", cpu=lambda number: switches.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw))
    with Runtime(1, ram=MIB) as runtime:
        number = kit.filled(runtime, 0, kind="persistent")
        with runtime.record() as step:
            for _ in range(500):
                runtime.submit(count, [(number, "RW")])
        step.replay().wait()
    assert len(switches) == 500
    assert switches[-1] - switches[250] < 25


def test_idle_workers_cost_nothing(kit) -> None:  # type: ignore[no-untyped-def]
    """Nothing polls: workers, copy engines and a program that waits hardly ever leave a processor, and take none of its time."""
    hold = threading.Event()
    with Runtime(1, sim_gpus=1, gpu_memory=MIB, ram=MIB) as runtime:
        number = kit.filled(runtime, 0)
        runtime.submit(Codelet("hold", cpu=lambda number: hold.wait(0.5)), [(number, "RW")])
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        runtime.wait()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches < 25
