from .bounds import lower_bounds
from .choice import choose_plan
from .device_share import largest_device_bytes
from .evaluation import AUTO
from .finalists import Judge
from .forecast import Pace
from .machine_pace import pace_of
from .ordered_step import SUBMISSION, last_tier_bytes, least_last_bytes
from .orders import candidates
from .planned_order import PlannedOrder, plan_order
from .recompute import BLOCK, NONE, Value, Values
from .value_groups import as_asked, most_again, what_is_asked

__all__ = [
    "AUTO",
    "BLOCK",
    "NONE",
    "SUBMISSION",
    "Judge",
    "Pace",
    "PlannedOrder",
    "Value",
    "Values",
    "as_asked",
    "candidates",
    "choose_plan",
    "largest_device_bytes",
    "last_tier_bytes",
    "least_last_bytes",
    "lower_bounds",
    "most_again",
    "pace_of",
    "plan_order",
    "what_is_asked",
]
