"""Training on the dashboard of a Dask cluster: the nodes' records (`plugin`), their latest state (`board`), and the page that draws it (`page`)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
