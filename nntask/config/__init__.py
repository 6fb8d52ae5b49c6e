"""Configuration of a run: flags as plain data, their rules, sizes and durations as people write them, environment variables."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
