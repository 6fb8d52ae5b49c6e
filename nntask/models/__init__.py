"""Families of models, each in one file that reads from top to bottom, and the one transformer that is built from their descriptions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
