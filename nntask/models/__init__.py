"""Models, each in one file that reads from top to bottom, and their configurations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
