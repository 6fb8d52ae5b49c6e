"""Memory needs and costs of a training step on a machine, from shapes alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
