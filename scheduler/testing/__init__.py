"""Fakes for tests: a driver without threads or time over small real buffers, a sequential reference to compare with, and a GPU that runs late."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
