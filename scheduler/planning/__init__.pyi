from .bounds import lower_bounds
from .choice import choose_plan
from .device_share import largest_device_bytes
from .evaluation import PlannedOrder
from .forecast import Pace
from .machine_pace import Judge, PlanningMachine, pace_of
from .ordered_step import SUBMISSION, last_tier_bytes, order_ranks
from .orders import candidates
from .recompute import BLOCK, NONE, Value, Values
from .urgency import by_urgency, on_kinds
from .value_groups import AUTO, as_asked, most_again, what_is_asked

__all__ = [
    "AUTO",
    "BLOCK",
    "NONE",
    "SUBMISSION",
    "Judge",
    "Pace",
    "PlannedOrder",
    "PlanningMachine",
    "Value",
    "Values",
    "as_asked",
    "by_urgency",
    "candidates",
    "choose_plan",
    "largest_device_bytes",
    "last_tier_bytes",
    "lower_bounds",
    "most_again",
    "on_kinds",
    "order_ranks",
    "pace_of",
    "what_is_asked",
]
