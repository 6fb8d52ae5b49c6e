"""The window of a lookahead, which is kept between events: it begins like one computed afresh, whatever has happened since."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search import search

from scheduler.core.events import Action
from scheduler.core.memory.prefetch import Lookahead, Outcome
from scheduler.core.records import RW, Condition, HandleRecord, Mode, R, Replay, W, WorkerKind
from scheduler.testing import FakeDriver

Layout = tuple[tuple[int, ...], tuple[tuple[WorkerKind, int, int], ...], bool]

LAYOUTS: dict[str, Layout] = {
    "a disk": ((12, 400), (("cpu", 0, 1), ("cpu", 0, 1)), True),
    "a device": ((60, 12), (("sim", 1, 2),), False),
    "a device and a disk": ((30, 12, 400), (("sim", 1, 2),), True),
    "two devices": ((60, 12, 12), (("sim", 1, 2), ("sim", 2, 2)), False),
}


class Compared(Lookahead):
    """A lookahead that compares its window with a new one whenever it keeps it, and fetches only for tasks that have yet to run."""

    def _renew_window(self) -> bool:
        may_differ = super()._renew_window()
        if not may_differ:
            kept = [entry for entry in self._missing() if self._is_to_come(*entry[1:])]
            afresh = [*Lookahead(self.replicas, self.node, is_only=self.is_only)._window()]
            absent = [[entry for entry in entries if self.node not in entry[0].replicas and entry[0].replicas] for entries in (kept, afresh)]
            assert absent[0] == absent[1][: len(absent[0])]
        return may_differ

    def _fetch(self, handle: HandleRecord, replay: Replay, position: int, queued: int, actions: list[Action]) -> Outcome:
        task = replay.tasks[position]
        assert not replay.done[position]
        assert task.state in ("waiting", "ready", "blocked")
        return super()._fetch(handle, replay, position, queued, actions)


def program(chance: Random, layout: Layout) -> tuple[FakeDriver, list[HandleRecord], list[list[tuple[HandleRecord, Mode]]], dict[int, Condition]]:
    """A driver, its data, and a step of which some tasks depend on flags; on two devices, each runs every second task."""
    pages, workers, storage = layout
    driver = FakeDriver(pages, workers, "dmda", storage=storage)
    handles = [driver.handle(chance.randint(1, 3), f"x{number}") for number in range(10)]
    flags = driver.handle(1, "flags")
    for handle in (*handles, flags):
        driver.submit((handle, W))
    tasks: list[list[tuple[HandleRecord, Mode]]] = [[(flags, RW)]]
    conditions = {0: Condition(flags=0)}
    for position in range(1, 17):
        tasks.append([(handle, chance.choice((R, RW))) for handle in chance.sample(handles, 2)])
        if chance.random() < 0.3:
            conditions[position] = Condition(guard=2, number=chance.randrange(8))
            tasks[-1].append((flags, R))
    driver.drain()
    return driver, handles, tasks, conditions


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 1 << 30), fails=st.booleans())
@search(100)
def test_a_kept_window_begins_like_one_computed_afresh(layout: str, seed: int, fails: bool) -> None:
    """Replays, plain tasks and failures, which end in any order; a kept window may end earlier, for the tasks that have ended since."""
    dice = Random(seed)
    driver, handles, tasks, conditions = program(dice, LAYOUTS[layout])
    partitions = [position % 2 for position in range(len(tasks))] if layout == "two devices" else []
    step = driver.record(tasks, {}, ("cpu", "sim"), conditions=conditions, partitions=partitions)
    nodes = driver.machine._lookaheads.by_node
    nodes |= {node: Compared(driver.machine._replicas, node, is_only=known.is_only) for node, known in nodes.items()}
    assert nodes
    for _ in range(80):
        draw = dice.random()
        if draw < 0.1 and step.can_replay:
            step.replay()
        elif draw < 0.15:
            driver.submit(*((handle, dice.choice((R, W, RW))) for handle in dice.sample(handles, dice.randint(1, 2))))
        elif driver.num_under_way:
            which = dice.randrange(driver.num_under_way)
            is_planted = fails and which < len(driver.running) and dice.random() < 0.05
            driver.end(which, ZeroDivisionError("planted") if is_planted else None)
    driver.drain(dice.randrange)
    driver.check()
