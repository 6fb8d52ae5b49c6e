"""Which step of a run each traced task belongs to."""

from __future__ import annotations

import pytest

from nntask.telemetry.tracing import steps_of_tasks
from scheduler.execution.trace import Ran, Trace


def ran(number: int) -> Ran:
    """A task of that number that ran."""
    trace = Trace()
    trace.add_task(0, "task", number, 0, 1, 0, [])
    return next(trace.tasks())


@pytest.mark.parametrize(
    ("begin", "since", "numbers", "steps"),
    [
        (1, 1, [10, 11, 20, 21, 10, 11], [1, 1, 2, 2, 3, 3]),
        (1, 2, [20, 21, 10, 11, 20, 21], [2, 2, 3, 3, 4, 4]),
        (5, 6, [20, 10], [6, 7]),  # resumed after step 4: step 5 is the first replay, of the first instance
        (1, 3, [10, 20, 5, 22], [3, 4, None, None]),  # not of the step
    ],
)
def test_instances_alternate(begin: int, since: int, numbers: list[int], steps: list[int | None]) -> None:
    """Two instances of two tasks, numbered from 10 and from 20, take turns from the first replay on, whichever is traced first."""
    found = steps_of_tasks([ran(number) for number in numbers], [10, 20], 2, begin, since)
    assert [place and place[0] for place in found] == steps
    assert [place[1] for place in found if place] == [number % 10 for number, step in zip(numbers, steps, strict=True) if step is not None]
