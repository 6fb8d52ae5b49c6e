from .metrics import Journal, Meter, read_metrics
from .step_record import StepRecord

__all__ = ["Journal", "Meter", "StepRecord", "read_metrics"]
