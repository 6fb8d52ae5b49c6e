"""Tiled tensors, the tasks each operation becomes, and the kernels that carry them out."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
