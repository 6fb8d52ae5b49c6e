"""Tiled tensors, the tasks each operation becomes, and the kernels that carry them out."""

from .startup import prefer_avx512

prefer_avx512()  # before anything below imports NumPy

from .tensor import TileTensor, TileView  # noqa: E402
from .tiling import Tiling  # noqa: E402

__all__ = ["TileTensor", "TileView", "Tiling"]
