from .api.capturing_runtime import CapturingRuntime
from .api.inline_runtime import InlineRuntime
from .api.recorded_step import Step, Ticket
from .api.recording import RecordingError
from .api.runtime import Runtime
from .api.task_runtime import Access, Handle, TaskRuntime, View, contribution, kept_in_contribution, tree
from .core.codelet import Codelet, Cost, Tail
from .core.errors import (
    Deadlock,
    DeviceFailed,
    DoesNotFit,
    HandleLost,
    PlacementError,
    RunStopped,
    RuntimeBroken,
    SchedulerError,
    Stalled,
    TaskError,
    TierFailed,
)
from .core.records import REDUX, RW, SCRATCH, DataClass, Kind, Mode, R, W
from .drivers.callbacks import FinishedTask, OnTask, SeenTile
from .drivers.cpu import usable_cores
from .drivers.disk import Source
from .execution.trace import TRACE_FORMAT, Accesses, Ran, Trace
from .execution.waiting import sleep_until
from .execution.workers import ASIDE_DEPTH, SIM_DEPTH

__all__ = [
    "ASIDE_DEPTH",
    "REDUX",
    "RW",
    "SCRATCH",
    "SIM_DEPTH",
    "TRACE_FORMAT",
    "Access",
    "Accesses",
    "CapturingRuntime",
    "Codelet",
    "Cost",
    "DataClass",
    "Deadlock",
    "DeviceFailed",
    "DoesNotFit",
    "FinishedTask",
    "Handle",
    "HandleLost",
    "InlineRuntime",
    "Kind",
    "Mode",
    "OnTask",
    "PlacementError",
    "R",
    "Ran",
    "RecordingError",
    "RunStopped",
    "Runtime",
    "RuntimeBroken",
    "SchedulerError",
    "SeenTile",
    "Source",
    "Stalled",
    "Step",
    "Tail",
    "TaskError",
    "TaskRuntime",
    "Ticket",
    "TierFailed",
    "Trace",
    "View",
    "W",
    "contribution",
    "kept_in_contribution",
    "sleep_until",
    "tree",
    "usable_cores",
]
