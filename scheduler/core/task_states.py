"""The states of a task, and the table of its transitions, which drives all of them.

Every change of `Task.state` goes through `TASK_TRANSITIONS`: code that knows what has happened to a task looks up the next state under that event,
such as `FINISHED`. A pair that is missing is impossible and raises `InvalidEvent`, to which the machine adds the story of the task.
A task may pass "ready" and "staged" within one event of the machine. A task of a recorded step ends every replay as waiting for the next one.
"""

from __future__ import annotations

from typing import Final, Literal

from .errors import InvalidEvent
from .records import TaskState

TaskEvent = Literal[
    "freed", "drawn, fits", "drawn, inputs missing", "drawn, no free bytes", "inputs arrived", "worker free", "finished", "raised",
    "reads lost data", "never fits", "flag is 0", "replayed",
]  # fmt: skip

TASK_TRANSITIONS: Final[dict[tuple[TaskState, TaskEvent], TaskState]] = {
    ("waiting", "freed"): "ready",
    ("waiting", "reads lost data"): "cancelled",
    ("waiting", "flag is 0"): "done",
    ("ready", "drawn, no free bytes"): "blocked",
    ("ready", "drawn, inputs missing"): "fetching",
    ("ready", "drawn, fits"): "staged",
    ("ready", "reads lost data"): "cancelled",
    ("blocked", "drawn, inputs missing"): "fetching",
    ("blocked", "drawn, fits"): "staged",
    ("blocked", "never fits"): "cancelled",
    ("blocked", "reads lost data"): "cancelled",
    ("fetching", "inputs arrived"): "staged",
    ("fetching", "reads lost data"): "cancelled",
    ("staged", "worker free"): "running",
    ("running", "finished"): "done",
    ("running", "raised"): "failed",
    ("done", "replayed"): "waiting",
    ("failed", "replayed"): "waiting",
    ("cancelled", "replayed"): "waiting",
}
"""(state, event) -> next state of a task; a pair that is missing is impossible."""


class ImpossibleTransition(InvalidEvent):
    """An event that is impossible in the state of a task. The machine catches it, and raises `InvalidEvent` with the story of the task."""


class Transition(dict[TaskState, TaskState]):
    """The rows of one event: state -> next state. A lookup in a dictionary takes a third of the time of a function with the same result."""

    def __init__(self, event: TaskEvent) -> None:
        super().__init__({before: after for (before, name), after in TASK_TRANSITIONS.items() if name == event})
        self.event = event

    def __missing__(self, state: TaskState) -> TaskState:
        raise ImpossibleTransition(f"{self.event!r} is impossible for a task that is {state}")


FREED: Final = Transition("freed")
FITS: Final = Transition("drawn, fits")
INPUTS_MISSING: Final = Transition("drawn, inputs missing")
NO_FREE_BYTES: Final = Transition("drawn, no free bytes")
INPUTS_ARRIVED: Final = Transition("inputs arrived")
WORKER_FREE: Final = Transition("worker free")
FINISHED: Final = Transition("finished")
RAISED: Final = Transition("raised")
READS_LOST_DATA: Final = Transition("reads lost data")
NEVER_FITS: Final = Transition("never fits")
FLAG_IS_ZERO: Final = Transition("flag is 0")
REPLAYED: Final = Transition("replayed")
