from .memory_fit import Sketch, capture, needs_of, order_on, sketch
from .needs import shortage
from .simulate import plan_run

__all__ = ["Sketch", "capture", "needs_of", "order_on", "plan_run", "shortage", "sketch"]
