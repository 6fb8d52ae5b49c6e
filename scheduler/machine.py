"""Names for packages that simulate, plan or report on a machine: records, models of durations, policies, traces.

Programs that only submit and record tasks need the names of `scheduler` alone.
"""

from .api.binding import Binding
from .api.labels import current_label, kept_here, labelled, next_minibatch
from .api.lanes import tree
from .core.codelet import KernelChain, Link, Many
from .core.link_model import DISK_LINK, KEPT_COPIES, MEMORY_LINK, LinkModel
from .core.memory.eviction_policies import DEFAULT_EVICTION, EVICTION_POLICIES
from .core.memory.extents import PAGE, rounded
from .core.memory.memory_node import MemoryNode
from .core.performance_model import Models, Rate, key_of
from .core.policies import MIXED_POLICIES, POLICIES, Candidate, Placement, policy_of
from .core.records import ANY, FILE, PROGRAM, HandleRecord, HandleSpec, NodeId, WorkerId, WorkerKind
from .core.shortage import access_sizes
from .core.step_plan import Phase, RecordedTask, StepPlan
from .execution.trace import TRACE_FORMAT, Accesses, Ran
from .execution.waiting import sleep_until
from .execution.watchdog import watchdog_seconds
from .execution.workers import ASIDE_DEPTH, SIM_DEPTH

__all__ = [
    "ANY",
    "ASIDE_DEPTH",
    "DEFAULT_EVICTION",
    "DISK_LINK",
    "EVICTION_POLICIES",
    "FILE",
    "KEPT_COPIES",
    "MEMORY_LINK",
    "MIXED_POLICIES",
    "PAGE",
    "POLICIES",
    "PROGRAM",
    "SIM_DEPTH",
    "TRACE_FORMAT",
    "Accesses",
    "Binding",
    "Candidate",
    "HandleRecord",
    "HandleSpec",
    "KernelChain",
    "Link",
    "LinkModel",
    "Many",
    "MemoryNode",
    "Models",
    "NodeId",
    "Phase",
    "Placement",
    "Ran",
    "Rate",
    "RecordedTask",
    "StepPlan",
    "WorkerId",
    "WorkerKind",
    "access_sizes",
    "current_label",
    "kept_here",
    "key_of",
    "labelled",
    "next_minibatch",
    "policy_of",
    "rounded",
    "sleep_until",
    "tree",
    "watchdog_seconds",
]
