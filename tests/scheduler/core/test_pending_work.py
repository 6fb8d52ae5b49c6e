"""The work of a replay that no worker has begun: equal to the sum over its pending tasks after every event, whatever the way in which tasks leave."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scheduler.core.events import Event
from scheduler.core.records import RW, Condition, HandleRecord, Mode, R, Replay, W
from scheduler.testing import FakeDriver, mix
from scheduler.testing.sequential import flags_in

SECONDS = (0.25, 1.0, 0.5)


class CountingDriver(FakeDriver):
    """A driver that compares the counted seconds with the sum after every event."""

    replays: tuple[Replay, ...] = ()

    def _bring(self, event: Event) -> None:
        super()._bring(event)
        for replay in self.replays:
            left = [task for task in replay.tasks if task.state in ("waiting", "ready") and not replay.done[task.position]]
            assert replay.pending_seconds == sum(task.spec.shared_seconds for task in left)

    def run(
        self,
        tasks: list[list[tuple[HandleRecord, Mode]]],
        *,
        conditions: dict[int, Condition] | None = None,
        pins: tuple[int | None, ...] = (),
        fails: bool = False,
    ) -> Replay:
        """Replay a recorded step twice; in the second replay, its first task may fail."""
        step = self.record(tasks, {}, conditions=conditions or {}, pins=pins)
        for position, task in enumerate(step.plan.tasks):
            task.shared_seconds = SECONDS[position % 3]
        for number in range(2):
            step.replay()
            self.replays = tuple(replay for replay, _ in step.instances)
            assert self.replays[-1].pending_seconds > 0
            if number and fails:
                self.end(0, ZeroDivisionError("planted"))
            self.drain()
            assert [replay.pending_seconds for replay in self.replays] == [0.0] * len(self.replays)
        self.check()
        return self.replays[-1]


def driver_with(pages: tuple[int, ...] = (64, 24), depth: int = 2) -> tuple[CountingDriver, list[HandleRecord]]:
    """A driver of a CPU worker and a device, and four handles with data in host memory."""
    driver = CountingDriver(pages, [("cpu", 0, 1), ("sim", 1, depth)], "dmdas")
    handles = [driver.handle(1, f"h{number}") for number in range(4)]
    for handle in handles:
        driver.submit((handle, W), kinds=("cpu",))
        driver.drain()
    return driver, handles


def test_tasks_that_a_worker_returns_to_the_policy_stay_pending() -> None:
    """All of its tasks wait for copies, so the device keeps its last slot for one that need not wait."""
    driver, handles = driver_with()
    replay = driver.run([[(handle, R)] for handle in handles])
    assert driver.machine._dispatch.policy._num_pushed > 4 + 2 * len(replay.tasks)  # type: ignore[attr-defined]


def test_pinned_tasks_leave_with_their_worker() -> None:
    """The policy never sees them."""
    driver, handles = driver_with()
    driver.run([[(handle, RW)] for handle in handles], pins=(0, 1, None, 1))


@pytest.mark.parametrize("mode", [R, RW])
def test_skipped_tasks_leave_without_a_worker(mode: Mode) -> None:
    """Of the tasks under a flag of 0 and those under a flag of 1, each first one precedes the other on the same data."""
    driver, (flags, *handles) = driver_with()
    values = flags_in(mix(1000, []))
    conditions = {0: Condition(flags=0)} | {position: Condition(guard=1, number=values.index(position % 2)) for position in range(1, 7)}
    driver.run([[(flags, W)], *[[(handle, mode), (flags, R)] for handle in (*handles, *handles)]], conditions=conditions)
    assert driver.machine.conditions.num_skipped == 6


def test_cancelled_tasks_leave_when_they_end() -> None:
    """The first task of the second replay fails; its successors are cancelled, and a task that reads none of its data runs."""
    driver, (first, second, third, fourth) = driver_with()
    driver.run([[(first, RW)], [(first, R), (second, RW)], [(second, R), (third, RW)], [(fourth, RW)]], fails=True)


def test_tasks_that_wait_for_memory_have_left() -> None:
    """The device holds one task at a time, and the others are blocked or with the policy."""
    driver, handles = driver_with(pages=(64, 2), depth=3)
    driver.run([[(handle, RW), (other, R)] for handle, other in pairwise(handles)])
