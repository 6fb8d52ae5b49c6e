from .memory_fit import CapturedStep, capture, needs_of, order_on
from .needs import shortage
from .simulate import plan_run

__all__ = ["CapturedStep", "capture", "needs_of", "order_on", "plan_run", "shortage"]
