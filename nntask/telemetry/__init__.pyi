from .metrics import Journal, Meter, StepPrinter, read_metrics
from .tracing import TRACE
from .traffic import recomputed_line

__all__ = ["TRACE", "Journal", "Meter", "StepPrinter", "read_metrics", "recomputed_line"]
