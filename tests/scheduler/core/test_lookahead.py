"""Looking ahead: what the planned order will evict goes down while the link is idle, one at a time, and links carry few prefetches at once."""

from __future__ import annotations

import random

import pytest

from scheduler.core.events import Action
from scheduler.core.memory.prefetch import AHEAD, TASKS, Lookahead, Outcome
from scheduler.core.records import RW, SCRATCH, HandleRecord, NodeId, R, Replay, W
from scheduler.testing import FakeDriver, FakeStep

RAM, SIM = NodeId(0), NodeId(1)
TILES, PAGES = 4, 6
READS = frozenset(range(TILES, 2 * TILES))


def started(leaves: frozenset[int], *, storage: bool = False, eviction: str = "next-use") -> tuple[FakeDriver, FakeStep]:
    """A step on a device that has room for all of it: it makes a tile in each of its first tasks, and reads one in each of those behind them."""
    pages = (TILES * PAGES, 2 * TILES * PAGES, 400) if storage else (400, 2 * TILES * PAGES)
    driver = FakeDriver(pages, [("sim", SIM, 1)], storage=storage, eviction=eviction)
    old, all_of_it = driver.handle(name="old"), driver.handle(2 * TILES * PAGES)
    for access in ((old, W), (all_of_it, SCRATCH)):  # nobody looks ahead where nothing has ever been evicted
        driver.submit(access)
        driver.drain()
    all_of_it.released = True
    tiles = [driver.handle(PAGES, f"x{at}") for at in range(TILES)]
    tasks = [[(tile, W)] for tile in tiles] + [[(tile, R)] for tile in tiles]
    step = driver.record(tasks, dict.fromkeys(tiles, False), leaves=leaves)
    step.replay()
    return driver, step


def test_data_that_will_change_before_a_use_is_known() -> None:
    """In the replay of that use up to it, and in all of the one before; of data that each replay makes anew, in that replay only."""
    driver = FakeDriver((400, 40), [("sim", SIM, 1)])
    shared, own, old = driver.handle(name="shared"), driver.handle(name="own"), driver.handle(name="old")
    for handle in (shared, old):
        driver.submit((handle, W))
        driver.drain()
    tasks = [[(shared, R), (own, W)], [(shared, RW)], [(shared, R), (own, R)], [(own, RW), (old, R)]]
    step = driver.record(tasks, {own: False})
    step.replay()
    step.replay()
    foresight = driver.machine._replicas.foresight
    first, second = foresight.replays

    def changes(handle: HandleRecord) -> list[bool]:
        return [foresight.will_change(handle, replay, position) for replay in (first, second) for position in range(len(tasks))]

    assert changes(shared) == [False, False, True, True, True, True, True, True]
    assert changes(old) == [False] * 8
    owned = first.tasks[0].accesses[1][0]
    assert [foresight.will_change(owned, first, position) for position in range(4)] == [False, True, True, True]
    driver.end(0)
    assert changes(shared)[:4] == [False, False, True, True]
    driver.end(0)
    assert changes(shared) == [False] * 6 + [True, True]


@pytest.mark.parametrize("storage", [False, True])
@pytest.mark.parametrize("leaves", [frozenset[int](), frozenset([TILES + 1]), READS])
def test_what_will_leave_goes_early_and_one_at_a_time(leaves: frozenset[int], storage: bool) -> None:
    """Although there is room for everything; also where host memory takes it on its way to the disk."""
    driver, _ = started(leaves, storage=storage)
    gone: set[str] = set()
    while driver.running:
        down = [name for name, source, _ in driver.routes if source == SIM]
        assert len(down) <= 1
        if down and driver.running[0].position >= TILES:
            driver.end(len(driver.running))
        else:
            driver.end(0)
        gone.update(name.rstrip("'") for name, source, _ in driver.routes if source == SIM)  # of the step's own copy
    assert gone <= {f"x{at - TILES}" for at in leaves}
    assert bool(gone) == bool(leaves)
    driver.drain()
    driver.check()


def test_the_end_of_a_write_back_starts_the_next_while_a_task_runs() -> None:
    """A long task must not leave the link idle."""
    driver, _ = started(READS)
    for _ in range(TILES):
        driver.end(0)
    (running,) = driver.running
    seen = []
    while driver.copying:
        seen.append(driver.routes[0][0])
        driver.end(1)
    assert driver.running == [running]
    assert len(seen) >= 2
    driver.drain()
    driver.check()


@pytest.mark.parametrize(("storage", "most"), [(False, 2), (True, 6)])
def test_few_copies_queue_on_a_link_between_memories(storage: bool, most: int) -> None:
    """What a task turns out to need at once would wait behind them; a disk serves several requests at a time."""
    place = RAM if storage else SIM
    driver = FakeDriver((600, 6000) if storage else (6000, 600), [("cpu" if storage else "sim", place, 1)], storage=storage)
    tiles, all_of_it = [driver.handle(PAGES, f"x{at}") for at in range(12)], driver.handle(600)
    for access in (*((tile, W) for tile in tiles), (all_of_it, SCRATCH)):
        driver.submit(access)
        driver.drain()
    all_of_it.released = True
    assert not any(place in tile.replicas for tile in tiles)
    long = driver.handle(name="long")
    driver.record([[(long, W)], *([(tile, R)] for tile in tiles)], {long: False}).replay()
    assert [task.position for task in driver.running] == [0]
    fetched: set[str] = set()
    while driver.routes:
        assert len(driver.routes) == min(most, len(tiles) - len(fetched))
        fetched.add(driver.routes[0][0])
        driver.end(1)
    assert len(fetched) == len(tiles)
    driver.drain()
    driver.check()


def waiting(ram: int, device: int, held: int, count: int) -> tuple[FakeDriver, list[str]]:
    """A device above memory and a disk: a long task holds some of it, and tasks behind that read one tile each, which lie below.

    Args:
        ram, device: pages.
        held: pages of the device.
        count: of the tiles.

    Returns:
        The driver, and the names of the tiles that lie on the disk.
    """
    driver = FakeDriver((ram, device, 600), [("sim", SIM, 1), ("sim", SIM, 1)], storage=True)
    tiles, all_of_it = [driver.handle(PAGES, f"x{at}") for at in range(count)], driver.handle(device)
    for access in (*((tile, W) for tile in tiles), (all_of_it, SCRATCH)):
        driver.submit(access)
        driver.drain()
    all_of_it.released = True
    first, room = driver.handle(name="first"), driver.handle(held)
    driver.submit((first, W), (room, SCRATCH))
    driver.record([[(first, R), (tile, R)] for tile in tiles], {}).replay()
    return driver, [tile.spec.name for tile in tiles if RAM not in tile.replicas]


def test_a_full_link_is_filled_again_as_soon_as_a_copy_has_ended() -> None:
    """Data that waited for the link follows, although no task has ended."""
    driver, on_disk = waiting(200, 30 * PAGES, 1, 8)
    assert on_disk == []
    fetched: set[str] = set()
    while driver.routes:
        assert len(driver.routes) == min(2, 8 - len(fetched))
        fetched.add(driver.routes[0][0])
        driver.end(1)
    assert len(fetched) == 8
    driver.drain()
    driver.check()


def test_room_is_kept_for_what_waits_for_a_full_link() -> None:
    """What is used later comes over another link, and would take it."""
    driver, on_disk = waiting(3 * PAGES, 16 * PAGES + 1, 13 * PAGES, 5)
    assert on_disk == ["x3", "x4"]
    assert [name for name, _, _ in driver.routes] == ["x0", "x1"]
    driver.end(1)
    assert "x2" in [name for name, _, _ in driver.routes]
    driver.drain()
    driver.check()


def test_data_that_a_plain_task_has_evicted_is_fetched_again() -> None:
    """A plain task takes the room of tiles that were fetched: they come again as soon as there is room, though no planned task has ended."""
    driver, _ = waiting(200, 30 * PAGES, 1, 4)
    while driver.routes:
        driver.end(1)
    (running,) = driver.running
    most = driver.handle(29 * PAGES)
    driver.submit((most, SCRATCH))
    most.released = True
    assert driver.routes == []
    driver.end(1)
    assert [name for name, _, target in driver.routes if target == SIM] == ["x0", "x1"]
    assert driver.running[0] is running
    driver.drain()
    driver.check()


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_policies_that_do_not_follow_the_plan_write_nothing_by_it(eviction: str) -> None:
    """They evict other data than it says."""
    driver, _ = started(READS, eviction=eviction)
    while driver.running:
        assert driver.routes == []
        driver.end(0)
    driver.check()


class Checking(Lookahead):
    """Fetches nothing for a task that has ended."""

    num_fetched_for = 0

    def _fetch(self, handle: HandleRecord, replay: Replay, position: int, queued: int, actions: list[Action]) -> Outcome:
        assert not replay.done[position]
        self.num_fetched_for += 1
        return super()._fetch(handle, replay, position, queued, actions)


@pytest.mark.parametrize("seed", range(40))
def test_a_window_has_unfinished_tasks_only(seed: int) -> None:
    """Tasks end in any order, and the next replay may be in progress before the last task of the present one has ended."""
    chance = random.Random(seed)
    driver = FakeDriver((12, 400), [("cpu", RAM, 1), ("cpu", RAM, 1)], storage=True)
    handles = [driver.handle(chance.randint(1, 4), f"x{at}") for at in range(10)]
    for handle in handles:
        driver.submit((handle, W))
    tasks = [[(handle, chance.choice([R, RW])) for handle in chance.sample(handles, 2)] for _ in range(16)]
    step = driver.record(tasks, {})
    driver.drain()
    lookahead = driver.machine._lookaheads.by_node[RAM] = Checking(driver.machine._replicas, RAM, is_only=True)
    for _ in range(2):
        step.replay()
        step.replay()
        driver.drain(chance.randrange)
    assert lookahead.num_fetched_for
    driver.check()


def emptied(count: int, pages: int, budget: int = 120) -> tuple[FakeDriver, list[HandleRecord]]:
    """Host memory above a disk, and tiles that lie on the disk alone."""
    driver = FakeDriver((budget, 6000), [("cpu", RAM, 1)], storage=True)
    tiles, all_of_it = [driver.handle(pages, f"x{at}") for at in range(count)], driver.handle(budget)
    for access in (*((tile, W) for tile in tiles), (all_of_it, SCRATCH)):
        driver.submit(access)
        driver.drain()
    all_of_it.released = True
    return driver, tiles


def test_a_window_misses_a_part_of_the_memory() -> None:
    """No more is fetched for tasks that are far away."""
    driver, tiles = emptied(15, PAGES)
    long = driver.handle(name="long")
    driver.record([[(long, W)], *([(tile, R)] for tile in tiles)], {long: False}).replay()
    while driver.copying:
        driver.end(1)
    assert sum(RAM in tile.replicas for tile in tiles) == -(-120 // AHEAD // PAGES)
    driver.drain()
    driver.check()


@pytest.mark.parametrize("is_within", [True, False])
def test_a_window_has_a_limit_of_tasks(is_within: bool) -> None:
    """Those that miss nothing count, and so does the one that runs."""
    driver, small, (tile, *_) = on_device()
    driver.submit((small, RW))
    driver.drain()
    driver.record([[(small, RW)]] * (TASKS - is_within) + [[(tile, R)]], {}).replay()
    assert [name for name, _, _ in driver.routes] == ["x0"] * is_within
    driver.drain()
    driver.check()


def test_a_window_goes_on_although_its_first_task_waits_for_the_program() -> None:
    """Those behind that one run; what they read is fetched before."""
    driver, tiles = emptied(40, PAGES)
    held = driver.handle(name="held")
    program = driver.submit((held, W), kinds=("host",))
    driver.record([[(held, RW), (tiles[0], R)], *([(tile, R)] for tile in tiles[1:])], {}).replay()
    missed = driver.machine.memory.num_misses
    while driver.num_under_way > 1:
        for _ in range(2):
            if driver.copying:
                driver.end(len(driver.running))
        if len(driver.running) > 1:
            driver.end(1)
    assert driver.machine.memory.num_misses == missed
    driver.finish(program)
    driver.drain()
    driver.check()


def on_device() -> tuple[FakeDriver, HandleRecord, list[HandleRecord]]:
    """A device that has evicted once; a handle in use there, and tiles below."""
    driver = FakeDriver((6000, 100), [("sim", SIM, 1)])
    tiles, small, all_of_it = [driver.handle(4, f"x{at}") for at in range(4)], driver.handle(name="small"), driver.handle(100)
    for access in (*((tile, W) for tile in (*tiles, small)), (all_of_it, SCRATCH)):
        driver.submit(access)
        driver.drain()
    all_of_it.released = True
    return driver, small, tiles


def test_a_window_is_computed_again_when_a_step_has_ended() -> None:
    """Only then is it known when the step behind uses its data."""
    driver, small, tiles = on_device()
    first, second = driver.record([[(small, RW)]] * 2, {}), driver.record([[(small, RW)]] * 20 + [[(tile, R)] for tile in tiles], {})
    first.replay()
    second.replay()
    while len(driver.machine._foresight.replays) > 1:
        driver.end(0)
    driver.end(0)
    assert [name for name, _, _ in driver.routes] == ["x0", "x1"]
    driver.drain()
    driver.check()


def test_data_that_the_program_has_overwritten_is_fetched_again() -> None:
    """What was there is out of date."""
    driver, small, (read, *_) = on_device()
    driver.submit((read, R), (small, RW))
    driver.drain()
    before, program = driver.submit((read, R), kinds=("host",)), driver.submit((read, W), kinds=("host",))
    driver.record([[(small, RW)]] * 40 + [[(read, R)]], {}).replay()
    driver.finish(before)
    driver.finish(program)
    assert [name for name, _, _ in driver.routes] == ["x0"]
    driver.drain()
    driver.check()
