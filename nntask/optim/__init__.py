"""Optimizers, learning rates as functions of the step, and data-parallel shards of both on several nodes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
