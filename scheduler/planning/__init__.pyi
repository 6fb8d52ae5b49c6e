from .bounds import lower_bounds
from .choose_order import AUTO, PlannedOrder, plan_order
from .choose_recompute import as_asked, choose_plan, most_again, what_is_asked
from .device_share import largest_device_bytes
from .forecast import Pace
from .machine_pace import pace_of
from .ordered_step import SUBMISSION, last_tier_bytes, least_last_bytes
from .orders import candidates
from .recompute import BLOCK, NONE, Value, Values
from .weighing import Judge

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
