from .interface import NodesChanged, Outcome, Pending
from .models import build_model
from .recorded import RecordedEngine, build_optimizer, emit_training_step, outcome_of

__all__ = ["NodesChanged", "Outcome", "Pending", "RecordedEngine", "build_model", "build_optimizer", "emit_training_step", "outcome_of"]
