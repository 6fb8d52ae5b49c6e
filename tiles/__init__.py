"""Tiled tensors, the tasks each operation becomes, and the kernels that carry them out."""

from .kernels.registry import emit, register, register_activation
from .tensor import TileTensor, TileView
from .tiling import Tiling

__all__ = ["TileTensor", "TileView", "Tiling", "emit", "register", "register_activation"]
