"""Export of checkpoints as model directories and adapters for other software, written without torch or transformers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
