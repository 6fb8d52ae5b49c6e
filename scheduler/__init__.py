"""The task runtime: tasks, data handles, workers and memory nodes. It knows bytes, not arrays, and no network."""

from .codelet import Codelet, Cost
from .core.errors import DoesNotFit, HandleLost, PlacementError, RunStopped, SchedulerError, Stalled, TaskError
from .core.records import REDUX, RW, SCRATCH, DataClass, Kind, Mode, R, W
from .drivers.cpu import usable_cores
from .drivers.disk import Source
from .frontend import Access, Handle, TaskRuntime, View, contribution, kept_in_contribution
from .inline import InlineRuntime
from .recording import RecordingError, Step, Ticket
from .runtime import Runtime
from .trace import Trace
from .watching import FinishedTask, SeenTile

__all__ = [
    "REDUX",
    "RW",
    "SCRATCH",
    "Access",
    "Codelet",
    "Cost",
    "DataClass",
    "DoesNotFit",
    "FinishedTask",
    "Handle",
    "HandleLost",
    "InlineRuntime",
    "Kind",
    "Mode",
    "PlacementError",
    "R",
    "RecordingError",
    "RunStopped",
    "Runtime",
    "SchedulerError",
    "SeenTile",
    "Source",
    "Stalled",
    "Step",
    "TaskError",
    "TaskRuntime",
    "Ticket",
    "Trace",
    "View",
    "W",
    "contribution",
    "kept_in_contribution",
    "usable_cores",
]
