"""Which tasks may create data on the last tier: the decision is that of the rule, written out position by position."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import example, given
from hypothesis import strategies as st
from support.plain_tasks import plain_task
from support.search import search

from scheduler.core.memory.eviction_policies import Foresight
from scheduler.core.memory.memory_node import MemoryNode
from scheduler.core.memory.reservations import Reservations
from scheduler.core.records import RAM, HandleId, HandleRecord, HandleSpec, Replay, ReplayPlan, Replica, SharedUse, Task, UseSchedule, W

PASSING = st.lists(st.sampled_from((0, 0, 4, 9)), min_size=4, max_size=7)


def temporary(replay: Replay, size: int) -> HandleRecord:
    """Data that dies with a replay."""
    handle = HandleRecord(HandleId(0), HandleSpec(size, size, None, "", "temporary", "activations"))
    handle.use_schedule = UseSchedule((0,), (W,), replay=replay)
    return handle


def lasting_data(size: int) -> HandleRecord:
    """Data that outlives replays."""
    return HandleRecord(HandleId(0), HandleSpec(size, size, None, "", "persistent", "parameters"))


def replays_of(steps: list[list[int]], frontier: int, makes: int, written: list[list[HandleRecord]]) -> list[Replay]:
    """Replays in progress, the oldest one up to a frontier, with the bytes of temporaries at each position; each task creates `makes` bytes.

    Args:
        written: lasting data that each of the replays writes.
    """
    replays, first = [], 10
    for passing, handles in zip(steps, written, strict=False):
        peaks = [*accumulate(reversed(passing), max, initial=0)][::-1]
        writer = plain_task(0, "writes", ("cpu",))
        shared = [SharedUse(handle, [], writer, writer, [], 1, False, UseSchedule((0,), (W,))) for handle in handles]
        replays.append(Replay(ReplayPlan([makes] * len(passing), passing, peaks), [], [], [], shared, first_order=first))
        first += len(passing)
    replays[0].frontier = frontier % len(steps[0])
    return replays


@given(
    steps=st.lists(PASSING, min_size=1, max_size=2),
    frontier=st.integers(0, 7),
    created=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=4),
    place=st.integers(2, 15),
    makes=st.integers(0, 3),
    budget=st.integers(6, 16),
    is_plain=st.booleans(),
    lasting=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.sets(st.integers(0, 1))), max_size=3),
)
@example(steps=[[0, 0, 9, 0]], frontier=0, created=[(2, 1)], place=3, makes=0, budget=8, is_plain=False, lasting=[])
@example(steps=[[0, 4]], frontier=0, created=[], place=3, makes=1, budget=9, is_plain=False, lasting=[(4, False, {0, 1}), (2, True, set())])
@search(1600)
def test_a_task_may_create_data_exactly_if_the_rule_holds(
    steps: list[list[int]],
    frontier: int,
    created: list[tuple[int, int]],
    place: int,
    makes: int,
    budget: int,
    is_plain: bool,
    lasting: list[tuple[int, bool, set[int]]],
) -> None:
    """Lasting data, temporaries at each position, and temporaries created ahead by tasks after it; the oldest task is not asked.

    `lasting` has the size of each piece of lasting data, whether it exists, and the replays that write it: it counts once if either holds.
    """
    data = [(lasting_data(size), exists, writers) for size, exists, writers in lasting]
    written = [[handle for handle, _, writers in data if number in writers] for number in range(2)]
    replays, foresight = replays_of(steps, frontier, makes, written), Foresight()
    foresight.replays = replays
    reservations = Reservations(MemoryNode("ram", budget), RAM, foresight)
    for replay in replays:
        reservations.promise(replay)
    for handle, exists, _ in data:
        if exists:
            reservations.enter(Replica(handle, RAM, 0), foresight.order)
    lasting_bytes = sum(handle.spec.size for handle, exists, writers in data if exists or writers & set(range(len(replays))))
    creators = [(foresight.order + distance, size) for distance, size in created]
    for order, size in creators:
        reservations.enter(Replica(temporary(replays[0], size), RAM, 0), order)
    task = task_at(replays, place, makes, is_plain=is_plain)
    fits = all(
        lasting_bytes + makes + replay.plan.passing[position] + sum(size for order, size in creators if order > replay.first_order + position)
        <= budget
        for replay in replays
        for position in range(replay.frontier, len(replay.plan.passing))
        if is_plain or replay.first_order + position < task.order
    )
    assert reservations.allow(task) == (fits or task.order <= foresight.order)


def task_at(replays: list[Replay], place: int, makes: int, *, is_plain: bool) -> Task:
    """A task that creates a temporary: of one of the replays, or one that the program submits after them."""
    places = [(replay, position) for replay in replays for position in range(replay.frontier, len(replay.plan.passing))]
    replay, position = places[place % len(places)]
    task = plain_task(0, "creates", ("cpu",), [(temporary(replay, makes), W)])
    task.order, task.step, task.position = replay.first_order + position, replay, position
    if is_plain:
        task.order, task.step = places[-1][0].first_order + places[-1][1] + 1, None
    return task
