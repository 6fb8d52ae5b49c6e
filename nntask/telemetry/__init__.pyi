from .metrics import Journal, Meter, read_metrics
from .traffic import recomputed_line

__all__ = ["Journal", "Meter", "read_metrics", "recomputed_line"]
