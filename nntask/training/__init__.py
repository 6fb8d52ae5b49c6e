"""Training runs: from a configuration to the loop, its evaluation, its run directory and its end."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
