"""Files: places to write to, files written whole or not at all, JSON of other programs, safetensors of tile tensors, strided ranges of arrays."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
