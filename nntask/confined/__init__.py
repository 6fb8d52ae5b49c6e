"""Work on programs of others (chat templates, rules of tokenizers) in processes that the kernel bounds in time, memory and files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
