from .emission import emit
from .kernels.catalog import register
from .kernels.registry import register_activation
from .tensor import TileTensor
from .tiling import Tiling
from .view import TileView

__all__ = ["TileTensor", "TileView", "Tiling", "emit", "register", "register_activation"]
