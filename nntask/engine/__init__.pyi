from .interface import NodesChanged, Outcome, Pending, StepEngine
from .recorded import RecordedEngine, build_model, build_optimizer, emit_training_step, outcome_of

__all__ = ["NodesChanged", "Outcome", "Pending", "RecordedEngine", "StepEngine", "build_model", "build_optimizer", "emit_training_step", "outcome_of"]
