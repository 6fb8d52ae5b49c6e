"""Division of a model into tiles: the sizes of its dimensions, and tables of them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
