"""Lower bounds of a recorded step: against sums and longest chains and bytes worked out by hand."""

from __future__ import annotations

import pytest

from scheduler.core.records import RW, HandleId, HandleRecord, HandleSpec, Kind, R, W
from scheduler.core.step_plan import RecordedTask, StepPlan
from scheduler.planning.bounds import lower_bounds
from scheduler.planning.forecast import Pace

MB = 1 << 20


def handle(number: int, size: int = MB, kind: Kind = "temporary") -> HandleRecord:
    """A handle of so many bytes."""
    return HandleRecord(HandleId(number), HandleSpec(size, size, None, f"h{number}", kind, "activations"))


def diamond() -> tuple[StepPlan, list[float]]:
    """One task, two beside each other, one that waits for both: 1, 2, 5 and 1 seconds."""
    a, b, c, d = (handle(number) for number in range(4))
    accesses = [((a, W),), ((a, R), (b, W)), ((a, R), (c, W)), ((b, R), (c, R), (d, W))]
    tasks = [RecordedTask(None, f"task {at}", ("cpu",), each, {}, 0) for at, each in enumerate(accesses)]
    return StepPlan(tasks, dict.fromkeys((a, b, c, d), False)), [1.0, 2.0, 5.0, 1.0]


def test_area_and_critical_path() -> None:
    """The sum over the workers; the longest chain, which more workers do not shorten."""
    plan, seconds = diamond()
    pace = Pace({}, 1e9, 1e9, duplex=True)
    for workers, area in ((1, 9.0), (2, 4.5), (3, 3.0)):
        found = lower_bounds(plan, seconds, num_workers=workers, memory=1 << 40, pace=pace)
        assert found == {"area": pytest.approx(area), "critical_path": 7.0, "link": 0.0}


@pytest.mark.parametrize(("memory", "duplex", "seconds"), [(2, True, 6.0), (2, False, 10.0), (4, True, 5.0), (4, False, 7.0), (14, False, 0.0)])
def test_link(memory: int, duplex: bool, seconds: float) -> None:
    """What exceeds memory comes in at 2 MiB a second, what is written goes out at 1; one after the other where they share the link."""
    read, written = handle(0, 8 * MB, "persistent"), handle(1, 6 * MB, "persistent")
    plan = StepPlan([RecordedTask(None, "use", ("cpu",), ((read, R), (written, RW)), {}, 0)], {})
    pace = Pace({}, 2 * MB, 1 * MB, duplex=duplex)
    assert lower_bounds(plan, [0.0], num_workers=1, memory=memory * MB, pace=pace)["link"] == pytest.approx(seconds)
