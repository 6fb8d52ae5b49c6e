"""Seconds that no schedule of a recorded step falls below, from the seconds of its tasks and the rates of its links.

area            the seconds of all tasks together over the number of workers
critical path   the seconds of the longest chain of tasks
link            what must enter or leave the memory where tasks run: of the data that outlives the step, what exceeds that memory comes in, and
                goes out again if the step writes it, over all links together, one direction after the other where they share them
"""

from __future__ import annotations

from collections.abc import Sequence

from .core.forecast import Pace
from .core.steps import StepPlan


def lower_bounds(plan: StepPlan, seconds: Sequence[float], *, num_workers: int, memory: int, pace: Pace) -> dict[str, float]:
    """Seconds by bound, see above.

    Args:
        seconds: of each task, by its place in the planned order.
        memory: bytes where tasks run.
        pace: how fast data comes and goes there.
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
