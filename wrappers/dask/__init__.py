"""Dask: training on its clusters (`cluster`, `node`), its graphs on our workers and memory (`get`, `runtime`), its arrays as tile tensors and back.

Each name is imported at its first use, so that importing this package costs nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
