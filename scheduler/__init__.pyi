from .api.capturing_runtime import CapturingRuntime
from .api.inline_runtime import InlineRuntime
from .api.labels import contribution
from .api.lanes import Access, Handle, View
from .api.recorded_step import Step, Ticket
from .api.recording import RecordingError
from .api.runtime import Runtime
from .api.task_runtime import TaskRuntime
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
from .core.records import REDUX, RW, SCRATCH, Condition, DataClass, Kind, Mode, R, W
from .core.shortage import Shortage
from .drivers.callbacks import FinishedTask, OnTask
from .drivers.disk import Source
from .execution.trace import Trace
from .storage.limits import usable_cores

__all__ = [
    "REDUX",
    "RW",
    "SCRATCH",
    "Access",
    "CapturingRuntime",
    "Codelet",
    "Condition",
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
    "RecordingError",
    "RunStopped",
    "Runtime",
    "RuntimeBroken",
    "SchedulerError",
    "Shortage",
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
    "usable_cores",
]
