from .memory_fit import CapturedStep, capture, more_memory, needs_of, no_collections, order_on, recomputing, thriftiest_needs, untouched
from .needs import Needs, shortage
from .simulate import plan_run, plan_step
from .updater import told_updater

__all__ = [
    "CapturedStep",
    "Needs",
    "capture",
    "more_memory",
    "needs_of",
    "no_collections",
    "order_on",
    "plan_run",
    "plan_step",
    "recomputing",
    "shortage",
    "thriftiest_needs",
    "told_updater",
    "untouched",
]
