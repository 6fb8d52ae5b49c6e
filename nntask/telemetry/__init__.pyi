from .metrics import Journal, Meter, read_metrics
from .tracing import TRACE
from .traffic import recomputed_line

__all__ = ["TRACE", "Journal", "Meter", "read_metrics", "recomputed_line"]
