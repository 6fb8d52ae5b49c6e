"""Tile operations: a pure shape rule, then the loop that emits tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
