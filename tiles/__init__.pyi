from . import block_format
from .block_format import BLOCK_FORMATS, ENCODED_FORMATS, BlockFormat
from .emission import emit
from .kernels.catalog import register
from .kernels.cpu.matmul import TOKEN_ROWS
from .kernels.registry import register_activation
from .quantised import QuantisedTensor
from .tensor import TileTensor
from .tiling import Tiling
from .view import TileView

__all__ = [
    "BLOCK_FORMATS",
    "ENCODED_FORMATS",
    "TOKEN_ROWS",
    "BlockFormat",
    "QuantisedTensor",
    "TileTensor",
    "TileView",
    "Tiling",
    "block_format",
    "emit",
    "register",
    "register_activation",
]
