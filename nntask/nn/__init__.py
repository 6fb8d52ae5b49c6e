"""Neural networks: automatic differentiation on a tape, differentiable operations, modules, layers and their first values."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
