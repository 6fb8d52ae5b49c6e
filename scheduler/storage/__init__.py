"""Memory of nodes: one arena per node, reserved once, so that no task allocates; the disk tier; memory limits; stored performance models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
