from .interchange import from_tensor, from_torch, lend_tile, to_tensor, to_torch
from .session.session import Session
from .steps.weights import empty_parameters
from .trainer.trainer import Trainer

__all__ = ["Session", "Trainer", "empty_parameters", "from_tensor", "from_torch", "lend_tile", "to_tensor", "to_torch"]
