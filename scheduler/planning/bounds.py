"""Lower bounds on the seconds of a recorded step, from the seconds of its tasks and the rates of its links.

=============  =======================================================================================================================
area           seconds of all tasks together, divided by the number of workers
critical path  seconds of the longest chain of dependent tasks
link           seconds of the copies that no order avoids. Of the data that outlives the step and has a use that is not conditional, the
               part that exceeds the memory where tasks run must be read into it; of the part that the step writes, the excess must be
               written back. The two add up if both directions share links; otherwise the larger one counts
=============  =======================================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.step_plan import StepPlan
from .forecast import Pace


def lower_bounds(plan: StepPlan, seconds: Sequence[float], *, num_workers: int, memory: int, pace: Pace) -> dict[str, float]:
    """Return the lower bounds on the seconds of a step.

    Args:
        plan: the step.
        seconds: duration of each task, by its position in the planned order.
        num_workers: number of workers.
        memory: bytes of the memory where tasks run.
        pace: rates of the links from and to that memory.

    Returns:
        "area", "critical_path" and "link" -> seconds, as defined above.
    """
    longest = [0.0] * len(plan.tasks)
    for position, before in enumerate(plan.predecessors):
        longest[position] = seconds[position] + max((longest[each] for each in before), default=0.0)
    lasting = [
        (handle.spec.size, use.last_writer is not None)
        for handle, use in plan.uses.items()
        if handle not in plan.owned and use.num_conditional < use.num_uses
    ]
    reading = max(0, sum(size for size, _ in lasting) - memory) / pace.read
    writing = max(0, sum(size for size, is_written in lasting if is_written) - memory) / pace.write
    return {
        "area": sum(seconds) / num_workers,
        "critical_path": max(longest, default=0.0),
        "link": max(reading, writing) if pace.duplex else reading + writing,
    }
