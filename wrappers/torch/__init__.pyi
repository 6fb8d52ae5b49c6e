from .interchange import from_tensor, from_torch, lend_tile, to_tensor, to_torch
from .session import Session, StartedStep

__all__ = ["Session", "StartedStep", "from_tensor", "from_torch", "lend_tile", "to_tensor", "to_torch"]
