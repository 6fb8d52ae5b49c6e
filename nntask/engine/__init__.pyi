from .interface import ModelShapes, NodesChanged, Outcome, Pending
from .models import build_model
from .opening import runtime_for
from .recorded import PlannedStep, RecordedEngine, build_optimizer, emit_training_step, outcome_of

__all__ = [
    "ModelShapes",
    "NodesChanged",
    "Outcome",
    "Pending",
    "PlannedStep",
    "RecordedEngine",
    "build_model",
    "build_optimizer",
    "emit_training_step",
    "outcome_of",
    "runtime_for",
]
