"""The training engine: what the training loop asks of a model on a runtime, and the engine of recorded steps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
