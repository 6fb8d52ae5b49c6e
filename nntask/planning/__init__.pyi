from .fit_advice import more_memory
from .memory_fit import CapturedStep, capture, least_needs, needs_of, no_collections, order_on, order_or_needs, untouched
from .needs import Needs, shortage
from .run_candidates import choose_minibatch, told_updater, with_few_tasks
from .simulate import plan_run, plan_step
from .value_figures import HEAD, cells, headline, order_figures, value_lines

__all__ = [
    "HEAD",
    "CapturedStep",
    "Needs",
    "capture",
    "cells",
    "choose_minibatch",
    "headline",
    "least_needs",
    "more_memory",
    "needs_of",
    "no_collections",
    "order_figures",
    "order_on",
    "order_or_needs",
    "plan_run",
    "plan_step",
    "shortage",
    "told_updater",
    "untouched",
    "value_lines",
    "with_few_tasks",
]
