"""The training engine: the interface between the training loop and a model on a runtime, and the engine of recorded steps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
