"""Adapters of frozen weights: LoRA, and the frozen base weights of a run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
