"""Training data: texts, rows, images and token files become shuffled training batches, with an exact cursor for resuming."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
