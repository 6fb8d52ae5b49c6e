"""What a training step needs of a machine and costs on it, from shapes alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
