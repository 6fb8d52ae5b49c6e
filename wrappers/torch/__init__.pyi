from .interchange import from_tensor, from_torch, lend_tile, to_tensor, to_torch
from .session import Session, StartedStep
from .trainer import Trainer

__all__ = ["Session", "StartedStep", "Trainer", "from_tensor", "from_torch", "lend_tile", "to_tensor", "to_torch"]
