from .interchange import from_tensor, from_torch, lend_tile, to_tensor, to_torch
from .session import Session
from .trainer import Trainer
from .weights import empty_parameters

__all__ = ["Session", "Trainer", "empty_parameters", "from_tensor", "from_torch", "lend_tile", "to_tensor", "to_torch"]
