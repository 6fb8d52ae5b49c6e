"""Conditional tasks in the machine: prefetch by known flags, eviction by expected use, and what a skipped task leaves."""

from __future__ import annotations

import pytest

from scheduler.core.records import RAM, RW, Condition, HandleRecord, NodeId, R, W
from scheduler.testing import FakeDriver, FakeStep, mix
from scheduler.testing.sequential import flags_in

DISK = NodeId(1)


def number_of(position: int, *, is_set: bool) -> int:
    """The number of a flag with this value, of those that the task at a position of a step writes from no inputs."""
    return flags_in(mix(1000 + position, [])).index(is_set)


def in_files(driver: FakeDriver, *names: str) -> list[HandleRecord]:
    """Handles of a page whose data lies in files."""
    handles = [driver.handle(name=name) for name in names]
    for handle in handles:
        driver.attach(handle)
    return handles


def written(driver: FakeDriver, *names: str) -> list[HandleRecord]:
    """Handles of a page that a task has written."""
    handles = [driver.handle(name=name) for name in names]
    for handle in handles:
        driver.submit((handle, W))
        driver.drain()
    return handles


def two_routers(*, num_pages: int) -> tuple[FakeDriver, FakeStep, HandleRecord]:
    """A step with two routers; two tasks use a weight under one flag of each, and a later one another weight."""
    driver = FakeDriver((num_pages, 100), [("cpu", 0, 1)] * 2, "eager", storage=True)
    weight, other = in_files(driver, "weight", "other")
    out, first, second, last = written(driver, "out", "first flags", "second flags", "last")
    accesses = [[(first, W)], [(second, W)], [(first, R), (weight, R), (out, RW)], [(second, R), (weight, R), (out, RW)], [(other, R), (out, RW)]]
    conditions = {
        0: Condition(flags=0),
        1: Condition(flags=0),
        2: Condition(guard=0, number=number_of(0, is_set=False)),
        3: Condition(guard=0, number=number_of(1, is_set=True)),
    }
    step = driver.record([*accesses, *([(last, RW)] for _ in range(60))], {}, conditions=conditions)
    return driver, step, weight


@pytest.mark.parametrize("num_pages", [5, 6, 8])
def test_prefetches_end_while_a_router_runs(num_pages: int) -> None:
    """Data that is fetched for a task whose flag is known is not evicted by another prefetch, although an earlier use of it may be skipped."""
    driver, step, weight = two_routers(num_pages=num_pages)
    step.replay()
    driver.drain()
    weight.use_rate = 0.05
    step.replay()
    driver.end(next(number for number, task in enumerate(driver.running) if task.position == 1))
    num_copies = 0
    while driver.copying:
        driver.end(len(driver.running))
        num_copies += 1
        assert num_copies < 20, "prefetches evict each other's data"
    driver.drain()
    driver.check()


def test_data_is_fetched_once_its_flag_is_known() -> None:
    """Not before; and for a flag of 0 not at all."""
    driver = FakeDriver((8, 100), [("cpu", 0, 1)], "eager", storage=True)
    chosen, declined = in_files(driver, "chosen", "declined")
    out, flags, big = written(driver, "out", "flags", "big")
    tasks = [[(flags, W)], [(big, RW)], [(flags, R), (chosen, R), (out, RW)], [(flags, R), (declined, R), (out, RW)]]
    conditions = {0: Condition(flags=0)}
    conditions |= {position: Condition(guard=0, number=number_of(0, is_set=position == 2)) for position in (2, 3)}
    step = driver.record(tasks, {}, conditions=conditions)
    step.replay()
    assert not driver.copying
    driver.end(0)  # the flags; the next task runs meanwhile
    assert [name for name, _, _ in driver.routes] == ["chosen"]
    driver.drain()
    assert (RAM in chosen.replicas, RAM in declined.replicas) == (True, False)
    driver.check()


def test_data_that_is_rarely_used_goes_first() -> None:
    """Of two weights that conditional tasks have used, the one with the lower use rate has the later expected use; a known use counts as it is."""
    driver = FakeDriver((40, 100), [("cpu", 0, 1)], "eager", storage=True)
    often, rarely = in_files(driver, "often", "rarely")
    out, flags = written(driver, "out", "flags")
    number = number_of(0, is_set=True)
    tasks = [[(flags, W)], [(flags, R), (rarely, R), (out, RW)], [(flags, R), (often, R), (out, RW)]]
    step = driver.record(tasks, {}, conditions={0: Condition(flags=0)} | dict.fromkeys((1, 2), Condition(guard=0, number=number, share=0.5)))
    step.replay()
    driver.drain()
    assert often.use_rate == rarely.use_rate > 0.5  # both were used once more
    often.use_rate, rarely.use_rate = 0.5, 0.1
    step.replay()
    policy = driver.machine._replicas.candidates[RAM].policy
    assert policy.key(rarely.replicas[RAM]) > policy.key(often.replicas[RAM]) > policy.foresight.order + 2
    driver.end(0)
    assert policy.key(rarely.replicas[RAM]) < policy.key(often.replicas[RAM])  # both will run, in this order
    driver.drain()
    driver.check()


def test_a_skipped_use_lowers_the_rate() -> None:
    """The rate is an average in which recent uses weigh most, from the expected share on."""
    driver = FakeDriver((40, 100), [("cpu", 0, 1)], "eager", storage=True)
    (weight,) = in_files(driver, "weight")
    out, flags = written(driver, "out", "flags")
    tasks = [[(flags, W)], [(flags, R), (weight, R), (out, RW)]]
    conditions = {0: Condition(flags=0), 1: Condition(guard=0, number=number_of(0, is_set=False), share=0.5)}
    step = driver.record(tasks, {}, conditions=conditions)
    rates = []
    for _ in range(3):
        step.replay()
        driver.drain()
        rates.append(weight.use_rate)
    assert 0.5 > rates[0] > rates[1] > rates[2] > 0.3
    assert driver.machine.conditions.num_skipped == 3


def test_a_replay_that_lost_data_has_changed_something() -> None:
    """Data that a skipped task was to overwrite is lost, so a replay that then fails is not as if it had not been."""
    driver = FakeDriver((40, 100), [("cpu", 0, 1)], "eager", storage=True)
    data, flags = written(driver, "data", "flags")
    result = driver.handle(name="result")
    tasks = [[(data, R), (result, W)], [(flags, W)], [(flags, R), (data, W)], [(data, R), (result, RW)]]
    conditions = {1: Condition(flags=0), 2: Condition(guard=0, number=number_of(1, is_set=False))}
    step = driver.record(tasks, {result: False}, conditions=conditions)
    step.replay()
    driver.drain()
    replay, _ = step.instances[0]
    assert replay.failure is not None
    assert data.lost is not None
    assert not replay.changed_nothing
