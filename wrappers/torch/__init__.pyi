from .interchange import from_tensor, from_torch, lend_tile, to_tensor, to_torch
from .session import Outcome, Pending, Session

__all__ = ["Outcome", "Pending", "Session", "from_tensor", "from_torch", "lend_tile", "to_tensor", "to_torch"]
