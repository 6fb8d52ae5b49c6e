"""Seconds that no schedule of a recorded step falls below, from the seconds of its tasks and the rates of its links.

area            the seconds of all tasks together over the number of workers
critical path   the seconds of the longest chain of tasks
link            the seconds of the traffic that no order avoids: the bytes of data that outlives the step and exceeds the memory where tasks run
                come in, and go out again where the step writes that data, over all links together; the directions add up where they share links
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.step_plan import StepPlan
from .forecast import Pace


def lower_bounds(plan: StepPlan, seconds: Sequence[float], *, num_workers: int, memory: int, pace: Pace) -> dict[str, float]:
    """Lower bounds on the seconds of a step, by name: "area", "critical_path" and "link", as defined above.

    Args:
        seconds: duration of each task, by its position in the planned order.
        memory: bytes of the memory where tasks run.
        pace: rates of the links from and to that memory.
    """
    longest = [0.0] * len(plan.tasks)
    for position, before in enumerate(plan.predecessors):
        longest[position] = seconds[position] + max((longest[each] for each in before), default=0.0)
    lasting = [(handle.size, use.last_writer is not None) for handle, use in plan.uses.items() if handle not in plan.owned]
    comes = max(0, sum(size for size, _ in lasting) - memory) / pace.read
    goes = max(0, sum(size for size, is_written in lasting if is_written) - memory) / pace.write
    return {
        "area": sum(seconds) / num_workers,
        "critical_path": max(longest, default=0.0),
        "link": max(comes, goes) if pace.duplex else comes + goes,
    }
