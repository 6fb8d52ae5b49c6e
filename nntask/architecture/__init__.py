"""Models as plain data: configs with their rules, descriptions of their parts, rotary positions, and the names of their weights in files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
