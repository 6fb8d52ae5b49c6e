from .metrics import Journal, Meter, read_metrics
from .step_record import StepRecord
from .traffic import recomputed_line

__all__ = ["Journal", "Meter", "StepRecord", "read_metrics", "recomputed_line"]
