"""Trained models at work: generation, sampling, perplexity, and whether the machine has the memory for them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
