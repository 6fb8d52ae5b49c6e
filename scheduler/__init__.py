"""The task runtime: tasks, data handles, workers and memory nodes. It knows bytes, not arrays, and no network."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
