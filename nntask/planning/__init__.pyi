from .memory_fit import CapturedStep, capture, choose_order, more_memory, needs_of, no_collections, order_on, recomputing, thriftiest_needs, untouched
from .needs import Needs, shortage
from .simulate import plan_run, plan_step, with_few_tasks

__all__ = [
    "CapturedStep",
    "Needs",
    "capture",
    "choose_order",
    "more_memory",
    "needs_of",
    "no_collections",
    "order_on",
    "plan_run",
    "plan_step",
    "recomputing",
    "shortage",
    "thriftiest_needs",
    "untouched",
    "with_few_tasks",
]
