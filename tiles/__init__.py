"""Tiled tensors, the tasks each operation becomes, and the kernels that carry them out."""

from .tensor import TileTensor, TileView
from .tiling import Tiling

__all__ = ["TileTensor", "TileView", "Tiling"]
