"""Operations over tile tensors: a pure shape rule each, then the loop that emits its tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
