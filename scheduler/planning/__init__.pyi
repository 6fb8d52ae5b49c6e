from .bounds import lower_bounds
from .choose_order import AUTO, SUBMISSION, PlannedOrder, last_tier_bytes, pace_of, plan_order
from .forecast import Pace
from .orders import arrange, candidates, repetition

__all__ = [
    "AUTO",
    "SUBMISSION",
    "Pace",
    "PlannedOrder",
    "arrange",
    "candidates",
    "last_tier_bytes",
    "lower_bounds",
    "pace_of",
    "plan_order",
    "repetition",
]
