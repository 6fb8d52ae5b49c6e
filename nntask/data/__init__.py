"""Training data: text or token files become shuffled batches of token windows, with an exact cursor."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
